"""The model and the optimizer that ``ZeroAccelerator.prepare`` returns, with Accelerate's semantics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import nn

from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_module import ZeroModule
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer, original_optimizer
from zero_ext.zero.construction.module_tensors import broadcast_buffers


class AcceleratedModule(ZeroModule):
    """A sharded model under autocast, with outputs in fp32, as Accelerate's mixed precision has them.

    Before an evaluation all ranks get rank 0's buffers. DistributedDataParallel does so before each forward.

    Args:
        module: a module that an engine belongs to already.
        autocast: makes the context of each forward; None without mixed precision.
        syncs_buffers: broadcast buffers before an evaluation.
    """

    _autocast: Callable[[], AbstractContextManager[Any]] | None
    _syncs_buffers: bool
    _stale: bool

    def __init__(
        self,
        module: nn.Module,
        autocast: Callable[[], AbstractContextManager[Any]] | None,
        syncs_buffers: bool,
    ) -> None:
        super().__init__(module)
        # Its own attributes from here on; others that are set on a wrapper go to the wrapped module.
        vars(self).update(_autocast=autocast, _syncs_buffers=syncs_buffers, _stale=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns, 16-bit tensors as fp32 under mixed precision.
        """
        self._follow_training()
        if self._autocast is None:
            return super().forward(*args, **kwargs)
        with self._autocast():
            outputs = super().forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    def _follow_training(self) -> None:
        """Give an evaluation the newest parameters and rank 0's buffers."""
        if self.module.training:  # the script may have called eval() of the module inside
            self._stale = True
            return
        engine = engine_of(self)
        if not torch.is_grad_enabled():
            engine.finish_updates()
        if self._stale and self._syncs_buffers and engine.world_size > 1:
            broadcast_buffers(self.module, engine.collectives)
        self._stale = False


class AcceleratedZeroOptimizer(AcceleratedOptimizer):
    """Step a sharded model where Accelerate synchronizes gradients.

    Args:
        optimizer: the prepared optimizer.
    """

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        # Its state has no copy that could be moved to the device: the engine keeps it in its tier.
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because fp16 gradients overflowed."""
        return bool(self.optimizer.step_was_skipped)

    def steps(self, optimizer: Any) -> bool:
        """Return whether this is `optimizer`, or was made of it.

        Args:
            optimizer: an optimizer, prepared or not.

        Returns:
            True if both update the same parameters.
        """
        return optimizer is not None and (
            optimizer is self or original_optimizer(optimizer) is self.optimizer.optimizer
        )

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make an optimizer step, unless Accelerate accumulates gradients; a collective of all ranks.

        Args:
            closure: computes the loss again before the update.

        Raises:
            RuntimeError: it is called inside the model's `no_sync()`, as `LocalSGD` does it.
        """
        if self.gradient_state.sync_gradients and not self.optimizer.engine.collector.syncs:
            raise RuntimeError(
                "optimizer.step(): expected a call outside no_sync(), got one inside, which would let "
                "parameters differ between ranks. Leave the block before the step. LocalSGD cannot train a "
                "sharded model."
            )
        super().step(closure)
