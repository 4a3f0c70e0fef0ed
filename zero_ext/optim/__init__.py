"""Per-shard optimizers: the fused one-pass Adam and torch's elementwise optimizers on flat fp32 shards."""

from zero_ext.optim.moments import moments_dtype_named
from zero_ext.optim.optimizer_registry import make_stepper, state_kinds
from zero_ext.optim.stepper import OwnedRange, Segment, Stepper, Total, UnshardedState, Update

__all__ = [
    "OwnedRange",
    "Segment",
    "Stepper",
    "Total",
    "UnshardedState",
    "Update",
    "make_stepper",
    "moments_dtype_named",
    "state_kinds",
]
