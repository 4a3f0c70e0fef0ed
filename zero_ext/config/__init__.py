"""Typed configuration, its JSON reader, and the translation of DeepSpeed's JSON."""

from .batch import BatchPolicy
from .deepspeed import Note, Translation, load_deepspeed_config
from .errors import ConfigError
from .load import load_config
from .offload import AioPolicy, OffloadPolicy, Tier
from .policies import (
    CheckpointPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    PrecisionPolicy,
    SchedulerPolicy,
    UnitPolicy,
)
from .root import ZeroConfig

__all__ = [
    "AioPolicy",
    "BatchPolicy",
    "CheckpointPolicy",
    "ConfigError",
    "LossScalePolicy",
    "Note",
    "OffloadPolicy",
    "OptimizerPolicy",
    "PrecisionPolicy",
    "SchedulerPolicy",
    "Tier",
    "Translation",
    "UnitPolicy",
    "ZeroConfig",
    "load_config",
    "load_deepspeed_config",
]
