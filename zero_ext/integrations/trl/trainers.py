"""TRL's SFTTrainer and DPOTrainer with ZeRO, with or without adapters."""

from __future__ import annotations

from typing import Any

from trl import DPOTrainer, SFTTrainer

from zero_ext.integrations.peft.peft_trainer import ZeroPeftTrainerMixin
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.transformers.model_patches import is_prepared, mark_prepared


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
                "and "
                "each rank has only shards. Leave it False."
            )

    def _shard_for_training(self) -> None:
        super()._shard_for_training()
        self._shard_reference()

    def _shard_for_evaluation(self) -> None:
        super()._shard_for_evaluation()
        self._shard_reference()

    def _shard_reference(self) -> None:
        if self.ref_model is not None and not is_prepared(self.ref_model):
            prepare(self.ref_model, None, self._zero_settings, wrap=False, device=self.args.device)
            mark_prepared(self.ref_model, None)
