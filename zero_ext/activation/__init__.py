"""Activation memory: calls that backward runs again, and where what they need waits until then."""

from zero_ext.activation.activation_checkpoint import (
    Checkpointing,
    checkpoint,
    checkpoint_activations,
    current,
)
from zero_ext.activation.activation_storage import RoomIsFull
from zero_ext.activation.partitioned_activations import DifferentInputs
from zero_ext.activation.random_streams import MODEL_PARALLEL, RandomStreams

__all__ = [
    "MODEL_PARALLEL",
    "Checkpointing",
    "DifferentInputs",
    "RandomStreams",
    "RoomIsFull",
    "checkpoint",
    "checkpoint_activations",
    "current",
]
