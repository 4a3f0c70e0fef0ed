"""DeepSpeed's public names on this engine: ``from zero_ext.integrations import deepspeed``.

Names that are not served are there too and raise :class:`DeepSpeedFeatureError`, which says what to do
instead, when they are used. docs/reference/deepspeed_api.md lists all of them.
"""

from typing import TYPE_CHECKING

from zero_ext.integrations.deepspeed import (
    accelerator,
    checkpointing,
    comm,
    monitor,
    ops,
    pipe,
    runtime,
    utils,
    zero,
)
from zero_ext.integrations.deepspeed.accelerator import get_accelerator
from zero_ext.integrations.deepspeed.arguments import add_config_arguments
from zero_ext.integrations.deepspeed.comm import init_distributed
from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine
from zero_ext.integrations.deepspeed.deepspeed_initialize import initialize
from zero_ext.integrations.deepspeed.registry import names
from zero_ext.integrations.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError, names_of
from zero_ext.integrations.deepspeed.utils.logging import log_dist, logger
from zero_ext.integrations.deepspeed.utils.on_device import OnDevice

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.pipe.pipeline_engine import PipelineEngine
    from zero_ext.integrations.deepspeed.pipe.pipeline_module import PipelineModule

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedFeatureError",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

__version__ = names().version
__getattr__ = names_of("deepspeed")
