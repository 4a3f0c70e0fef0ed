"""Checkpoints: saved completely or not at all, loaded at any world size and stage, exported to Hugging Face.

Activation checkpointing is :func:`zero_ext.checkpoint_activations`.
"""

from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.state_source import LazyStateSource, StateSource, StoredValues
from zero_ext.checkpoint.inspection import CheckpointReport, inspect_checkpoint
from zero_ext.checkpoint.loading import LoadedCheckpoint, load_state
from zero_ext.checkpoint.save_session import SaveHandle
from zero_ext.checkpoint.saving import save_state
from zero_ext.checkpoint.weights.hf_export import export_huggingface

__all__ = [
    "CheckpointError",
    "CheckpointReport",
    "LazyStateSource",
    "LoadedCheckpoint",
    "SaveHandle",
    "StateSource",
    "StoredValues",
    "export_huggingface",
    "inspect_checkpoint",
    "load_state",
    "save_state",
]
