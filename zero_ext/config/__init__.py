"""Typed configuration, its readers, and the translation of DeepSpeed's JSON."""

from zero_ext.config.activation_checkpointing import ActivationCheckpointingConfig
from zero_ext.config.communication import CommunicationConfig
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.monitoring import FlopsConfig, MonitorConfig, ProgressConfig, TraceConfig, WandbConfig
from zero_ext.config.offload import AioConfig, OffloadConfig
from zero_ext.config.sources.config_source import load_config
from zero_ext.config.sparse_attention import SparseAttentionConfig
from zero_ext.config.tiers import Tier
from zero_ext.config.training import (
    BatchConfig,
    CheckpointConfig,
    LossConfig,
    LossScaleConfig,
    MlpConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SchedulerConfig,
    UnitConfig,
)

from .deepspeed import Note, Translation, load_deepspeed_config
from .zero_config import ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CommunicationConfig",
    "ConfigError",
    "FlopsConfig",
    "LossConfig",
    "LossScaleConfig",
    "MlpConfig",
    "MonitorConfig",
    "Note",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
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
