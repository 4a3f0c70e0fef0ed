"""Optimizers that exchange signs between the ranks: 1-bit Adam, 0/1 Adam, 1-bit LAMB."""

from zero_ext.optim.one_bit.adam import OneBitAdam
from zero_ext.optim.one_bit.check import check_one_bit_optimizer
from zero_ext.optim.one_bit.lamb import OneBitLamb
from zero_ext.optim.one_bit.optimizer import OneBitOptimizer
from zero_ext.optim.one_bit.phase import Phase
from zero_ext.optim.one_bit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitOptimizer", "Phase", "ZeroOneAdam", "check_one_bit_optimizer"]
