"""Typed configuration, its JSON reader, and the translation of DeepSpeed's JSON."""

from zero_ext.config.schema.config_errors import ConfigError
from zero_ext.config.sections.activation_checkpointing import ActivationCheckpointingConfig
from zero_ext.config.sections.batch_sizes import BatchConfig
from zero_ext.config.sections.communication import CommunicationConfig
from zero_ext.config.sections.monitoring import (
    FlopsConfig,
    MonitorConfig,
    ProgressConfig,
    TraceConfig,
    WandbConfig,
)
from zero_ext.config.sections.offload import AioConfig, OffloadConfig, Tier
from zero_ext.config.sections.sparse_attention import SparseAttentionConfig
from zero_ext.config.sections.training import (
    CheckpointConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    UnitConfig,
)

from .deepspeed import Note, Translation, load_deepspeed_config
from .load_config import load_config
from .zero_config import ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CommunicationConfig",
    "ConfigError",
    "FlopsConfig",
    "LossScaleConfig",
    "MonitorConfig",
    "Note",
    "OffloadConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ProgressConfig",
    "SchedulerConfig",
    "SparseAttentionConfig",
    "Tier",
    "TraceConfig",
    "Translation",
    "UnitConfig",
    "WandbConfig",
    "ZeroConfig",
    "load_config",
    "load_deepspeed_config",
]
