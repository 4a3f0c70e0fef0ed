"""A Trainer with sequences or experts over ranks, as the section ``parallel`` says."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.config import ZeroConfig
from zero_ext.integrations.batch_sharing import share_batches
from zero_ext.integrations.requested_layout import apply_layout, layout_mesh
from zero_ext.integrations.transformers.full_batches import gather_outputs
from zero_ext.integrations.transformers.trainer_config import refuse_with_layout

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class LayoutTrainerMixin(_Base):
    """Distributes samples over the ranks that do not share them, and counts each of them once."""

    _zero_settings: ZeroConfig
    _mesh: DeviceMesh | None = None
    gather_function: Any

    @property
    def _sequence_ranks(self) -> int:
        """Number of consecutive ranks with the same samples, each with a shard of their sequences."""
        return self._zero_settings.parallel.cp

    def _share_batches(self) -> None:
        """Have loaders of the Trainer's accelerator return the same samples to ranks that share sequences."""
        refuse_with_layout(self, self._zero_settings)
        if self._sequence_ranks > 1:
            share_batches(self.accelerator, self._sequence_ranks)
            # It was bound before the accelerator changed its class.
            options = getattr(self.gather_function, "keywords", {})
            self.gather_function = functools.partial(self.accelerator.gather_for_metrics, **options)

    def _lay_out(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Shard sequences or spread experts, as the section `parallel` says."""
        device_type = self.args.device.type
        self._mesh = layout_mesh(self._zero_settings, self.args.world_size, device_type)
        self._mesh = apply_layout(self.model, optimizer, self._zero_settings, self._mesh)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples per optimizer step.

        Args:
            args: as in the Trainer.

        Returns:
            The samples of all ranks, each once.
        """
        return int(super().get_total_train_batch_size(args)) // self._sequence_ranks

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a step on this rank.

        Args:
            inputs: as in the Trainer.

        Returns:
            Those of this rank's tokens.
        """
        return int(super().floating_point_ops(inputs)) // self._sequence_ranks

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self._sequence_ranks

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch.

        Args:
            model: as in the Trainer.
            inputs: as in the Trainer.
            prediction_loss_only: as in the Trainer.
            ignore_keys: as in the Trainer.

        Returns:
            Loss, logits and labels of the full sequences.
        """
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._sequence_ranks > 1 and logits is not None:
            logits = gather_outputs(self.model, logits, tokens.shape[1])
        return loss, logits, labels
