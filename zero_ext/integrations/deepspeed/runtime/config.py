"""``deepspeed.runtime.config``: DeepSpeed's JSON as an object that is asked by attribute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.integrations.deepspeed.arguments import json_values
from zero_ext.integrations.deepspeed.engine_accessors import SettingsQuestions
from zero_ext.integrations.deepspeed.unsupported import names_of

DeepSpeedConfigError = ConfigError


class ZeroStageEnum(IntEnum):
    """ZeRO stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """The devices that state may be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class _Section(BaseModel):
    """A section of the JSON: given keys, else DeepSpeed's defaults, as attributes."""

    model_config = ConfigDict(extra="forbid")


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    device: str = "none"
    nvme_path: str | Path | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = False


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    device: str = "none"
    nvme_path: str | Path | None = None
    buffer_count: int = 4
    pin_memory: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8


class DeepSpeedZeroConfig(_Section):
    """The section ``zero_optimization``, with DeepSpeed's own defaults; what they become here says
    docs/reference/configuration.md."""

    stage: int = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    sub_group_size: int = 1_000_000_000
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = True
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int = -1
    leaf_module: Any = None


class DeepSpeedConfig:
    """A checked configuration. ``values`` is the JSON as given, ``native`` what it means here.

    Raises :class:`DeepSpeedConfigError` (``zero_ext.ConfigError``) listing all that is wrong with it.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | Path, mpu: object = None, mesh_device: object = None
    ) -> None:
        del mpu, mesh_device  # without model parallelism every rank is a data-parallel one
        translation = load_deepspeed_config(config)
        self.values = json_values("DeepSpeedConfig", config)
        self.notes = translation.notes
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        settings = translation.config
        self.native: ZeroConfig = settings.replace(batch=settings.batch.resolve(self.world_size))
        self.zero_config = DeepSpeedZeroConfig(**self._known_zero_keys())

    def __getattr__(self, name: str) -> Any:
        """Return what the engine answers by a method of the name is an attribute here."""
        question = vars(SettingsQuestions).get({"zero_enabled": "zero_optimization"}.get(name, name))
        if name.startswith("_") or not callable(question):
            raise AttributeError(f"DeepSpeedConfig has no {name!r}")
        return question(self)

    def print_user_config(self) -> None:
        """Print the JSON as given."""
        print(json.dumps(self.values, indent=2, sort_keys=True))

    def _known_zero_keys(self) -> dict[str, Any]:
        section = self.values.get("zero_optimization") or {}
        return {key: value for key, value in section.items() if key in DeepSpeedZeroConfig.model_fields}


__getattr__ = names_of(
    "deepspeed.runtime.config", "deepspeed.runtime.zero.config", "deepspeed.runtime.zero.offload_config"
)
