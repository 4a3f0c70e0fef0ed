"""The configuration of a ``ZeroStrategy``: its own arguments, held against and completed by the Trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from zero_ext.config import ConfigError, ZeroConfig, load_config
from zero_ext.config.config_errors import Problem, show

ConfigSource = ZeroConfig | Mapping[str, Any] | str | Path | None

_OWN = "ZeroStrategy(stage, config)"
_BOTH = "ZeroStrategy's config and Trainer"
_AGREE = "Make them agree, or leave one out."
# Keys of the configuration whose work Lightning does, with where it is told to.
_LIGHTNINGS = {
    "optimizer": "the LightningModule's configure_optimizers makes the optimizer",
    "scheduler": "the LightningModule's configure_optimizers makes the schedulers",
    "checkpoint.keep_last": "Lightning counts its own checkpoints: ModelCheckpoint(save_top_k=...)",
    "checkpoint.async_save": "Lightning removes older checkpoints as soon as a save returns",
}


def own_settings(stage: int | None, source: ConfigSource) -> ZeroConfig:
    """Return what the strategy's own arguments say, stage 3 by default.

    Raises:
        ConfigError: ``stage`` and the configuration's differ, or a key is set for work that Lightning does.
        TypeError: a source of another type.
    """
    config = load_config(source)
    problems = [
        Problem(path, f"got {show(_said(config, path))}: {why}. Remove the key.")
        for path, why in _LIGHTNINGS.items()
        if _said(config, path) not in (None, False)
    ]
    said = _said(config, "stage")
    if stage is not None and said is not None and said != stage:
        problems.append(Problem("stage", f"config has {show(said)}, stage={show(stage)} was given. {_AGREE}"))
    if problems:
        raise ConfigError(problems, _OWN)
    return config if stage is None else config.replace(stage=stage)


def with_dtype(config: ZeroConfig, precision: str, dtype: str | None) -> ZeroConfig:
    """``config`` in the ``dtype`` that ``Trainer(precision=...)`` asks for, None if it asks for nothing.

    Raises ``ConfigError`` if the configuration asks for another one.
    """
    said = _said(config, "precision.dtype")
    if dtype is None:
        return config
    if said is not None and said != dtype:
        text = f"config has {show(said)}, Trainer(precision={precision!r}) means {dtype!r}. {_AGREE}"
        raise ConfigError(Problem("precision.dtype", text), _BOTH)
    return config.replace(precision=config.precision.replace(dtype=dtype))


def completed(config: ZeroConfig, trainer: Trainer, module: LightningModule) -> ZeroConfig:
    """``config`` with the Trainer's gradient accumulation and clipping.

    Clipping becomes part of the step, unless the module decides about it in ``configure_gradient_clipping``.
    Raises ``ConfigError`` for contradictions, both sides shown, and for clipping by value.
    """
    problems = []
    changes: dict[str, Any] = {}
    steps = trainer.accumulate_grad_batches
    said = _said(config, "batch.gradient_accumulation_steps")
    if said is not None and said != steps:
        text = f"config has {said}, Trainer(accumulate_grad_batches={steps}). {_AGREE}"
        problems.append(Problem("batch.gradient_accumulation_steps", text))
    changes["batch"] = config.batch.replace(gradient_accumulation_steps=steps)
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if value and algorithm is not None and algorithm.value != "norm":
        text = (
            f"expected Trainer(gradient_clip_algorithm='norm'), got {algorithm.value!r}: no rank has the "
            "full "
            "gradients. Use 'norm', the true global norm."
        )
        problems.append(Problem("gradient_clipping", text))
    said = _said(config, "gradient_clipping")
    if value is not None and said is not None and said != float(value):
        text = f"config has {said}, Trainer(gradient_clip_val={value}). {_AGREE}"
        problems.append(Problem("gradient_clipping", text))
    if problems:
        raise ConfigError(problems, _BOTH)
    if value is not None and not is_overridden("configure_gradient_clipping", module):
        changes["gradient_clipping"] = float(value)
    return config.replace(**changes)


def _said(config: ZeroConfig, path: str) -> Any:
    """Return the value at a key path if whoever wrote the configuration gave one, else None."""
    found: Any = config
    for name in path.split("."):
        if found is None or name not in found.model_fields_set:
            return None
        found = getattr(found, name)
    return found
