"""Checkpoints: saved whole or not at all, loaded at any world size and stage, exported to Hugging Face.

Called as a function, ``zero_ext.checkpoint(function, *args)`` is :func:`zero_ext.checkpoint_activations`.
"""

import sys
from types import FunctionType, ModuleType
from typing import cast

from zero_ext.activation import checkpoint_activations
from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.state_source import LazyStateSource, StateSource, StoredValues
from zero_ext.checkpoint.inspection import CheckpointReport, inspect_checkpoint
from zero_ext.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from zero_ext.checkpoint.save_session import SaveHandle
from zero_ext.checkpoint.saving import save_checkpoint
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
    "load_checkpoint",
    "save_checkpoint",
]

# Users of torch and DeepSpeed look for activation checkpointing by the name this package has. A function,
# which torch.compile can trace, stands for the package and has the package's names.
_function = FunctionType(checkpoint_activations.__code__, checkpoint_activations.__globals__, __name__)
_function.__dict__ = globals()
_function.__doc__ = __doc__
sys.modules[__name__] = cast(ModuleType, _function)
