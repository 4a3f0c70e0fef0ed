"""Optimizers that exchange signs between the ranks: 1-bit Adam, 0/1 Adam, 1-bit LAMB."""

from zero_ext.optim.one_bit.compression_phase import CompressionPhase
from zero_ext.optim.one_bit.onebit_adam import OneBitAdam
from zero_ext.optim.one_bit.onebit_checks import check_one_bit_optimizer
from zero_ext.optim.one_bit.onebit_lamb import OneBitLamb
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer
from zero_ext.optim.one_bit.zero_one_adam import ZeroOneAdam

__all__ = [
    "CompressionPhase",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "ZeroOneAdam",
    "check_one_bit_optimizer",
]
