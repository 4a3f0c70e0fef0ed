"""The private names of transformers' Trainer that the integration uses, and the check that they exist.

Python reports no override of a method that a release has renamed: the model would train unsharded.
"""

from __future__ import annotations

import inspect

import transformers
from transformers import Trainer

# Releases that tests run with. pyproject.toml requires the oldest. Before it there is no
# ``_prepare_for_training``.
OLDEST, NEWEST = "5.3.0", "5.23.0"
OVERRIDDEN = (
    "_build_accelerator_args",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_inner_training_loop",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_maybe_log_save_evaluate",
    "_move_model_to_device",
    "_prepare_for_training",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_track_num_input_tokens",
)
# Attributes of a trainer that are set here, each with the method that reads it there.
ATTRIBUTES = {"_created_lr_scheduler": "_prepare_for_training"}


def check_transformers() -> None:
    """Raise ``ImportError`` for a transformers release that is not supported."""
    found = transformers.__version__
    missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
    for name, reader in ATTRIBUTES.items():
        if reader not in missing and name not in inspect.unwrap(getattr(Trainer, reader)).__code__.co_names:
            missing.append(name)
    oldest, version = (tuple(map(int, each.split(".")[:2])) for each in (OLDEST, found))
    if missing or not oldest <= version < (6,):
        lacks = f" without Trainer.{', Trainer.'.join(missing)}" if missing else ""
        raise ImportError(
            f"transformers: expected {OLDEST} or newer, below 6 (tested up to {NEWEST}), got {found}{lacks}. "
            f"Run pip install transformers=={NEWEST}."
        )
