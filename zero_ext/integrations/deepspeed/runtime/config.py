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


def _reads(path: str, words: str) -> Any:
    """A property with the value at ``path`` of the native configuration; None if its section is missing."""
    section, _, name = path.rpartition(".")

    def read(config: DeepSpeedConfig) -> Any:
        found = getattr(config.native, section) if section else config.native
        value = None if found is None else getattr(found, name)
        return dict(value) if isinstance(value, Mapping) else value

    return property(read, doc=words)


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

    train_batch_size = _reads("batch.train_batch_size", "Samples of one optimizer step over all ranks.")
    train_micro_batch_size_per_gpu = _reads("batch.micro_batch_size", "Samples of one forward on one rank.")
    gradient_accumulation_steps = _reads(
        "batch.gradient_accumulation_steps", "Micro-batches of one optimizer step."
    )
    zero_optimization_stage = _reads("stage", "The ZeRO stage.")
    gradient_clipping = _reads("gradient_clipping", "The largest gradient norm; 0 for none.")
    optimizer_name = _reads("optimizer.type", "The type that the optimizer section names.")
    optimizer_params = _reads("optimizer.params", "The parameters of the optimizer section.")
    scheduler_name = _reads("scheduler.type", "The type that the scheduler section names.")
    scheduler_params = _reads("scheduler.params", "The parameters of the scheduler section.")
    steps_per_print = _reads("steps_per_print", "Steps between progress lines.")

    @property
    def zero_enabled(self) -> bool:
        """Whether anything is sharded."""
        return self.native.stage > 0

    @property
    def fp16_enabled(self) -> bool:
        """Whether parameters compute in fp16."""
        return self.native.precision.dtype == "fp16"

    @property
    def bfloat16_enabled(self) -> bool:
        """Whether parameters compute in bf16."""
        return self.native.precision.dtype == "bf16"

    def print_user_config(self) -> None:
        """Prints the JSON as given."""
        print(json.dumps(self.values, indent=2, sort_keys=True))

    def _known_zero_keys(self) -> dict[str, Any]:
        given = self.values.get("zero_optimization") or {}
        return {key: value for key, value in given.items() if key in DeepSpeedZeroConfig._DEFAULTS}


__getattr__ = names_of(
    "deepspeed.runtime.config", "deepspeed.runtime.zero.config", "deepspeed.runtime.zero.offload_config"
)
