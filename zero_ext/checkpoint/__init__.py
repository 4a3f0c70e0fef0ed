"""Checkpoints: saved whole or not at all, loaded at any world size and stage, exported to Hugging Face."""

from zero_ext.checkpoint.errors import CheckpointError
from zero_ext.checkpoint.export import export_huggingface
from zero_ext.checkpoint.inspect import CheckpointReport, inspect_checkpoint
from zero_ext.checkpoint.load import LoadedCheckpoint, load_checkpoint
from zero_ext.checkpoint.save import save_checkpoint
from zero_ext.checkpoint.session import SaveHandle
from zero_ext.checkpoint.source import LazyStateSource, StateSource, StoredValues

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
    "load_checkpoint",
    "save_checkpoint",
]
