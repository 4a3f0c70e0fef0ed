"""``ZeroPeftTrainerMixin``: a Hugging Face Trainer on adapters over a sharded base model."""

from __future__ import annotations

import logging
import os
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import Trainer

from zero_ext.integrations.peft import adapter_checkpoints
from zero_ext.integrations.peft.adapters import adapter_state_dict, mark_adapters
from zero_ext.integrations.peft.prepare_adapters import keep_packing
from zero_ext.integrations.transformers.model_patches import is_prepared
from zero_ext.integrations.transformers.trainer import ZeroTrainerMixin

logger = logging.getLogger("zero_ext")


class ZeroPeftTrainerMixin(ZeroTrainerMixin):
    """`ZeroTrainerMixin` for models with PEFT's adapters, and unchanged for models without.

    The base model, quantized by bitsandbytes or not, is sharded frozen. Checkpoints hold the adapter as PEFT
    writes it and the adapters' optimizer. The base model is in none of them, and resuming expects it as it
    was.
    """

    @property
    def _adapters(self) -> PeftModel | None:
        return self.model if isinstance(self.model, PeftModel) else None

    def _check_adapters(self) -> None:
        """Accept adapters of PEFT; those that transformers' own ``add_adapter`` makes are not served."""
        if self._adapters is None:
            super()._check_adapters()

    # -- sharding -----------------------------------------------------------------------------------------

    def _shard_for_training(self) -> None:
        keep_packing(self.model)
        super()._shard_for_training()
        self._mark()

    def _shard_for_evaluation(self) -> None:
        keep_packing(self.model)
        super()._shard_for_evaluation()
        self._mark()

    def _mark(self) -> None:
        if self._adapters is not None:
            mark_adapters(self._adapters)

    # -- saving -------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self._adapters is not None and is_prepared(self.model):
            state_dict = adapter_state_dict(self._adapters)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._adapters is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            adapter_checkpoints.save_training(
                output_dir, self._adapters, self.lr_scheduler, self.state.global_step
            )

    # -- resuming -----------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._adapters is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            adapter_checkpoints.check_resume(resume_from_checkpoint, self._adapters)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._adapters is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            adapter_checkpoints.resume_training(checkpoint, self._adapters, self.lr_scheduler)

    def _load_best_model(self) -> None:
        if self._adapters is None:
            super()._load_best_model()
            return
        folder = os.fspath(self.state.best_model_checkpoint)
        logger.info("loading the best adapter from %s (%s)", folder, self.state.best_metric)
        adapter_checkpoints.load_best(folder, self._adapters)


class ZeroPeftTrainer(ZeroPeftTrainerMixin, Trainer):
    """`transformers.Trainer` on adapters over a sharded model.

    It takes what the Trainer takes, and `zero_config`, as
    [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin].
    """
