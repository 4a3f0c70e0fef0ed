"""DeepSpeed's public names on this engine: ``from zero_ext.integrations import deepspeed``.

Names that are not served are there too and raise :class:`DeepSpeedFeatureError`, which says what to do
instead, when they are used. docs/reference/deepspeed_api.md lists all of them.
"""

from typing import TYPE_CHECKING

from zero_ext.integrations.deepspeed.deepspeed_accelerator import get_accelerator
from zero_ext.integrations.deepspeed.deepspeed_comm import init_distributed
from zero_ext.integrations.deepspeed.deepspeed_config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    add_config_arguments,
)
from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine
from zero_ext.integrations.deepspeed.deepspeed_initialize import initialize
from zero_ext.integrations.deepspeed.deepspeed_reports import log_dist, logger
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError, names_of
from zero_ext.integrations.deepspeed.name_registry import names
from zero_ext.integrations.deepspeed.zero_construction import OnDevice

if TYPE_CHECKING:  # torch's pipelines, which these are made on, take a second to import
    from zero_ext.integrations.deepspeed.pipeline_engine import PipelineEngine
    from zero_ext.integrations.deepspeed.pipeline_module import PipelineModule

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
__getattr__ = names_of("deepspeed", globals())
