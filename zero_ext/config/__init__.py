"""Typed configuration, its JSON reader, and the translation of DeepSpeed's JSON."""

from zero_ext.config.schema.config_errors import ConfigError
from zero_ext.config.sections.activation_checkpointing import ActivationPolicy
from zero_ext.config.sections.batch_sizes import BatchPolicy
from zero_ext.config.sections.communication import CommunicationPolicy
from zero_ext.config.sections.monitoring import (
    FlopsPolicy,
    MonitorPolicy,
    ProgressPolicy,
    TracePolicy,
    WandbPolicy,
)
from zero_ext.config.sections.offload import AioPolicy, OffloadPolicy, Tier
from zero_ext.config.sections.sparse_attention import SparseAttentionPolicy
from zero_ext.config.sections.training import (
    CheckpointPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    PrecisionPolicy,
    SchedulerPolicy,
    UnitPolicy,
)

from .deepspeed import Note, Translation, load_deepspeed_config
from .load_config import load_config
from .zero_config import ZeroConfig

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
