"""ZeRO for an ordinary PyTorch training loop: sharded parameters, gradients and optimizer state."""

from zero_ext.zero.gathered import double_backward, full_gradient, full_state_dict, gathered, load_full_state_dict
from zero_ext.zero.prepare import prepare

__all__ = [
    "double_backward",
    "full_gradient",
    "full_state_dict",
    "gathered",
    "load_full_state_dict",
    "prepare",
]
