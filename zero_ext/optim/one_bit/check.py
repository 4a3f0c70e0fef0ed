"""Whether an optimizer that exchanges signs fits a configuration, before anything is sharded."""

from __future__ import annotations

import torch

from zero_ext.config import ZeroConfig
from zero_ext.config.one_bit import check_one_bit, warn_of_late_freeze
from zero_ext.optim.one_bit.adam import OneBitAdam
from zero_ext.optim.one_bit.optimizer import OneBitOptimizer


def check_one_bit_optimizer(optimizer: torch.optim.Optimizer | None, config: ZeroConfig) -> None:
    """Raises ``ValueError`` if ``optimizer`` is of the one-bit family and ``config`` does not serve it; warns
    if it would never compress. Nothing is asked of other optimizers."""
    if not isinstance(optimizer, OneBitOptimizer):
        return
    name = type(optimizer).__name__
    check_one_bit(name, config)
    if config.stage == 1:
        optimizer.check_sharded()
    if isinstance(optimizer, OneBitAdam):
        warn_of_late_freeze(name, optimizer.freeze_step, config)
