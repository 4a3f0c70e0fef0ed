"""``deepspeed.runtime.config``: DeepSpeed's JSON as an object that is asked by attribute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.integrations.deepspeed.refused import names_of
from zero_ext.integrations.deepspeed.settings import SettingsQuestions

DeepSpeedConfigError = ConfigError


class ZeroStageEnum(IntEnum):
    """ZeRO stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where state may be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class _Section:
    """A section of the JSON: given keys, else DeepSpeed's defaults, as attributes."""

    _DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    _INNER: ClassVar[Mapping[str, type[_Section]]] = {}

    def __init__(self, **given: Any) -> None:
        unknown = sorted(given.keys() - self._DEFAULTS.keys())
        if unknown:
            raise ValueError(
                f"{type(self).__name__}: no key {unknown[0]!r}; known: {', '.join(self._DEFAULTS)}"
            )
        for name, default in self._DEFAULTS.items():
            value = given.get(name, default)
            inner = self._INNER.get(name)
            if inner is not None and isinstance(value, Mapping):
                value = inner(**value)
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def model_dump(self) -> dict[str, Any]:
        """Plain keys and values."""
        return {k: v.model_dump() if isinstance(v, _Section) else v for k, v in vars(self).items()}


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    _DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": False,
    }


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    _DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 4,
        "pin_memory": False,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    }


class DeepSpeedZeroConfig(_Section):
    """The section ``zero_optimization``, with DeepSpeed's own defaults; what they become here says
    docs/configuration.md."""

    _DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,
        "offload_param": None,
        "offload_optimizer": None,
        "sub_group_size": 1_000_000_000,
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "mics_shard_size": -1,
        "leaf_module": None,
    }
    _INNER: ClassVar[Mapping[str, type[_Section]]] = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }


class DeepSpeedConfig:
    """A checked configuration. ``values`` is the JSON as given, ``native`` what it means here.

    Raises :class:`DeepSpeedConfigError` (``zero_ext.ConfigError``) listing all that is wrong with it.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | Path, mpu: object = None, mesh_device: object = None
    ) -> None:
        del mpu, mesh_device  # without model parallelism every rank is a data-parallel one
        translation = load_deepspeed_config(config)
        self.values = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
        self.notes = translation.notes
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        settings = translation.config
        self.native: ZeroConfig = settings.replace(batch=settings.batch.resolve(self.world_size))
        self.zero_config = DeepSpeedZeroConfig(**self._known_zero_keys())

    # The engine's methods are attributes here.
    train_batch_size = property(SettingsQuestions.train_batch_size)
    train_micro_batch_size_per_gpu = property(SettingsQuestions.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = property(SettingsQuestions.gradient_accumulation_steps)
    zero_optimization_stage = property(SettingsQuestions.zero_optimization_stage)
    zero_enabled = property(SettingsQuestions.zero_optimization)
    gradient_clipping = property(SettingsQuestions.gradient_clipping)
    optimizer_name = property(SettingsQuestions.optimizer_name)
    optimizer_params = property(SettingsQuestions.optimizer_params)
    scheduler_name = property(SettingsQuestions.scheduler_name)
    scheduler_params = property(SettingsQuestions.scheduler_params)
    steps_per_print = property(SettingsQuestions.steps_per_print)
    fp16_enabled = property(SettingsQuestions.fp16_enabled)
    bfloat16_enabled = property(SettingsQuestions.bfloat16_enabled)

    def print_user_config(self) -> None:
        """Prints the JSON as given."""
        print(json.dumps(self.values, indent=2, sort_keys=True))

    def _known_zero_keys(self) -> dict[str, Any]:
        given = self.values.get("zero_optimization") or {}
        return {key: value for key, value in given.items() if key in DeepSpeedZeroConfig._DEFAULTS}


__getattr__ = names_of(
    "deepspeed.runtime.config", "deepspeed.runtime.zero.config", "deepspeed.runtime.zero.offload_config"
)
