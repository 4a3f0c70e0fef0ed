"""Activation checkpointing: recompute calls in backward, and offload or partition their inputs."""

from zero_ext.activation.activation_checkpoint import (
    ActivationCheckpointing,
    checkpoint_activations,
    current_checkpointing,
)
from zero_ext.activation.activation_storage import BufferFullError
from zero_ext.activation.chunked_checkpoint import checkpoint_in_chunks
from zero_ext.activation.chunked_cross_entropy import linear_cross_entropy
from zero_ext.activation.partitioned_activations import DifferentInputsError
from zero_ext.activation.random_streams import MODEL_PARALLEL, RandomStreams

__all__ = [
    "MODEL_PARALLEL",
    "ActivationCheckpointing",
    "BufferFullError",
    "DifferentInputsError",
    "RandomStreams",
    "checkpoint_activations",
    "checkpoint_in_chunks",
    "current_checkpointing",
    "linear_cross_entropy",
]
