"""TRL's SFTTrainer and DPOTrainer with ZeRO, with or without adapters."""

from __future__ import annotations

from typing import Any

from trl import DPOTrainer, SFTTrainer

from zero_ext.integrations.peft.peft_trainer import ZeroPeftTrainerMixin
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.transformers.model_patches import is_prepared, mark_prepared


class ZeroSFTTrainer(ZeroPeftTrainerMixin, SFTTrainer):
    """``trl.SFTTrainer`` on a sharded model; ``peft_config`` trains adapters over it. Takes ``zero_config``
    beside what SFTTrainer takes, see :class:`ZeroTrainerMixin`."""


class ZeroDPOTrainer(ZeroPeftTrainerMixin, DPOTrainer):
    """``trl.DPOTrainer`` on a sharded model. Takes ``zero_config`` beside what DPOTrainer takes.

    The reference model is sharded as the policy is, in the same tier; with adapters it is the policy with its
    adapters disabled, and takes no memory. Raises ``ValueError`` for ``sync_ref_model``, which would write to
    a sharded reference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.sync_ref_model:
            raise ValueError(
                "sync_ref_model=True writes to the reference model in place, of which each rank "
                "holds only shards; leave it False"
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
