"""Typed configuration, its JSON reader, and the translation of DeepSpeed's JSON."""

from .activation import ActivationPolicy
from .attention import SparseAttentionPolicy
from .batch import BatchPolicy
from .communication import CommunicationPolicy
from .deepspeed import Note, Translation, load_deepspeed_config
from .errors import ConfigError
from .load import load_config
from .monitor import FlopsPolicy, MonitorPolicy, ProgressPolicy, TracePolicy, WandbPolicy
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
    "ActivationPolicy",
    "AioPolicy",
    "BatchPolicy",
    "CheckpointPolicy",
    "CommunicationPolicy",
    "ConfigError",
    "FlopsPolicy",
    "LossScalePolicy",
    "MonitorPolicy",
    "Note",
    "OffloadPolicy",
    "OptimizerPolicy",
    "PrecisionPolicy",
    "ProgressPolicy",
    "SchedulerPolicy",
    "SparseAttentionPolicy",
    "Tier",
    "TracePolicy",
    "Translation",
    "UnitPolicy",
    "WandbPolicy",
    "ZeroConfig",
    "load_config",
    "load_deepspeed_config",
]
