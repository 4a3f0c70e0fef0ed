"""TRL's trainers on sharded models, with or without adapters: fine-tuning and preference optimization."""

from __future__ import annotations

from typing import Any

try:
    from trl import DPOTrainer, SFTTrainer
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.trl: the package '{error.name}' is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install trl peft."
    ) from error

from zero_ext.integrations.peft import ZeroPeftTrainerMixin
from zero_ext.integrations.transformers.model_patches import is_prepared, mark_prepared

__all__ = ["ZeroDPOTrainer", "ZeroSFTTrainer"]


class ZeroSFTTrainer(ZeroPeftTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` on a sharded model; `peft_config` trains adapters over it.

    It takes what SFTTrainer takes, and `zero_config`, as
    [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin].
    """


class ZeroDPOTrainer(ZeroPeftTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` on a sharded model.

    The reference model is sharded as the policy is, in the same tier. With adapters it is the policy with its
    adapters disabled, and takes no memory.

    Args:
        *args: passed on to DPOTrainer.
        **kwargs: passed on to DPOTrainer, and `zero_config`.

    Raises:
        ValueError: `sync_ref_model` is true, which would write to a sharded reference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.sync_ref_model:
            raise ValueError(
                "sync_ref_model: expected False, got True: it writes to the full reference model in place, "
                "and each rank has only shards. Leave it False."
            )

    def _finish_sharding(self) -> None:
        super()._finish_sharding()
        if self.ref_model is not None and not is_prepared(self.ref_model):
            self._prepare(self.ref_model, None)
            mark_prepared(self.ref_model, None)
