"""Checkpoints: saved whole or not at all, loaded at any world size and stage, exported to Hugging Face.

Called as a function, ``zero_ext.checkpoint(function, *args)`` is :func:`zero_ext.checkpoint_activations`.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

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


class _CallablePackage(ModuleType):
    """Users of torch and DeepSpeed look for activation checkpointing by the name this package has."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from zero_ext.activation import checkpoint_activations

        return checkpoint_activations(function, *args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
