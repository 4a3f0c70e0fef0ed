"""Activation memory: calls that backward runs again, and where what they need waits until then."""

from zero_ext.activation.checkpointing import Checkpointing, checkpoint, checkpoint_activations, current
from zero_ext.activation.partition import DifferentInputs
from zero_ext.activation.random_streams import MODEL_PARALLEL, RandomStreams
from zero_ext.activation.room import RoomIsFull

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
