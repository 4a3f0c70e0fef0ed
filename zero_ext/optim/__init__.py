"""Per-shard optimizers: the fused one-pass Adam and torch's elementwise optimizers on flat fp32 shards."""

from zero_ext.optim.select import make_stepper
from zero_ext.optim.stepper import OwnedRange, Segment, Stepper

__all__ = ["OwnedRange", "Segment", "Stepper", "make_stepper"]
