"""``deepspeed.runtime.config``: DeepSpeed's JSON as an object that is asked by attribute."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, IntEnum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.config_errors import show
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.config.deepspeed.deepspeed_keys import AUTO
from zero_ext.config.deepspeed.translate import KEYS
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.sources.environment_settings import flattened
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.construction.grouping import DTYPES

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

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: str | Path | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: str | Path | None = None
    buffer_count: int = 4
    pin_memory: bool = True
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
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = Field(50_000_000, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(100_000, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(sys.maxsize, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = Field(1_000_000_000, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(1_000_000_000, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int = -1
    log_trace_cache_warnings: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: Any = None


def _dtype_of(native: ZeroConfig) -> torch.dtype:
    return torch.float32 if native.precision.dtype == "keep" else DTYPES[native.precision.dtype]


def _loss_scale(native: ZeroConfig) -> dict[str, Any]:
    scale = native.loss_scale
    return {
        "init_scale": 2**scale.initial_power,
        "scale_window": scale.window,
        "delayed_shift": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive_hysteresis,
        "min_scale": scale.minimum,
    }


# Methods of features that do not exist here, which return False.
_ABSENT = (
    "autotuning_enabled autotuning_profile_model_info bf16_master_weights_and_gradients "
    "checkpoint_writer_enabled compile_autosp compile_autotp compile_zero_optimization_stage "
    "curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled "
    "fp16_master_weights_and_gradients is_deepcompile_active is_deepcompile_enabled random_ltd_enabled "
    "super_offload torch_autocast_enabled use_node_local_storage uses_parallelization_pass_only "
    "zero_quantized_nontrainable_weights"
)
# Methods of DeepSpeed's engine by the value of the configuration in force that they return: at a path, ...
_IN_FORCE: dict[str, str | Callable[[ZeroConfig], Any]] = {
    "train_batch_size": "batch.train_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "managed_gradient_accumulation": "batch.managed_gradient_accumulation",
    "dataloader_drop_last": "batch.drop_last",
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization_stage": "stage",
    "zero_partial_offload": "offload.ratio",
    "loss_scale": "loss_scale.static",
    "get_batch_info": attrgetter(
        "batch.train_batch_size", "batch.micro_batch_size", "batch.gradient_accumulation_steps"
    ),
    # ... or computed from it.
    "get_data_types": lambda native: (_dtype_of(native), DTYPES[native.precision.grad_accum_dtype]),
    "zero_optimization": lambda native: native.stage > 0,
    "zero_optimization_partition_gradients": lambda native: native.stage >= 2,
    "zero_optimization_partition_weights": lambda native: native.stage == 3,
    "is_first_weights_partition_group": lambda native: native.stage == 3,
    "zero_gather_16bit_weights_on_model_save": lambda native: True,
    "zero_cpu_offload": lambda native: native.offload.optimizer == "host",
    "zero_nvme_offload_optimizer": lambda native: native.offload.optimizer == "nvme",
    "zero_use_cpu_optimizer": lambda native: native.offload.optimizer != "device",
    "zero_quantized_weights": lambda native: native.communication.quantized_weights is not None,
    "zero_quantized_gradients": lambda native: native.communication.quantized_gradients is not None,
    "zero_hpz_partition_size": lambda native: (
        (native.communication.hierarchical_partition and native.communication.ranks_per_node) or 1
    ),
    "fp16_enabled": lambda native: native.precision.dtype == "fp16",
    "bfloat16_enabled": lambda native: native.precision.dtype == "bf16",
    "bf16_optimizer_states": lambda native: native.precision.moments_dtype == "bf16",
    "dynamic_loss_scale": lambda native: native.precision.dtype == "fp16" and not native.loss_scale.static,
    "dynamic_loss_scale_args": _loss_scale,
    "initial_dynamic_scale": lambda native: 2**native.loss_scale.initial_power,
    "optimizer_name": lambda native: native.optimizer and native.optimizer.type,
    "optimizer_params": lambda native: native.optimizer and dict(native.optimizer.params),
    "scheduler_name": lambda native: native.scheduler and native.scheduler.type,
    "scheduler_params": lambda native: native.scheduler and dict(native.scheduler.params),
    "autotp_size": lambda native: 0,
    "zenflow_config": lambda native: None,
    "checkpoint_tag_validation_enabled": lambda native: native.checkpoint.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda native: native.checkpoint.tag_validation == "fail",
    "wall_clock_breakdown": lambda native: native.monitor is not None and native.monitor.timing,
    "memory_breakdown": lambda native: native.monitor is not None and native.monitor.memory,
    "flops_profiler_enabled": lambda native: native.monitor is not None and native.monitor.flops is not None,
    **dict.fromkeys(_ABSENT.split(), lambda native: False),
}

# Those that return what a key of the JSON says, or DeepSpeed's default: of sections whose fields they are
# named after, ...
_FLOPS = {
    "detailed": True,
    "module_depth": -1,
    "output_file": None,
    "profile_step": 1,
    "recompute_fwd_factor": 0.0,
    "top_modules": 1,
}
_NOT_BY_NAME = ("zero_", "mics_", "gather_", "stage", "overlap_")
_WRITTEN: dict[str, tuple[str, Any]] = {
    **{f"flops_profiler_{name}": (f"flops_profiler.{name}", default) for name, default in _FLOPS.items()},
    **{
        f"zero_{name.removeprefix('use_')}": (f"zero_optimization.{field.alias or name}", field.default)
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if f"zero_optimization.{name}" in KEYS and not name.startswith(_NOT_BY_NAME)
    },
    # ... and others.
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "dump_state": ("dump_state", False),
    "log_level": ("log_level", None),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
}
# Attributes that never change.
_FIXED = {
    "mpu": None,
    **dict.fromkeys(("mp_world_size", "sequence_parallel_size"), 1),
    **dict.fromkeys(("gradient_average", "enable_backward_allreduce"), True),
    **dict.fromkeys(("has_moe_layers", "pipeline_parallelism", "is_compiled"), False),
}

# What DeepSpeed calls the tiers of a native configuration.
_DEVICES = {"host": "cpu"}


class SettingsQuestions:
    """Methods named as DeepSpeed's engine has them; ``config`` is the JSON as it was given.

    Those without arguments that only look something up are in the tables above.
    """

    config: Mapping[str, Any]

    @property
    def native(self) -> ZeroConfig:
        """The native configuration in force, batch sizes resolved."""
        return engine_of(self).config  # type: ignore[arg-type]

    zero_config = native

    @property
    def world_size(self) -> int:
        """Ranks that share the state."""
        return engine_of(self).world_size  # type: ignore[arg-type]

    dp_world_size = seq_dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return engine_of(self).rank  # type: ignore[arg-type]

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are sent."""
        sent = self.native.precision.communication_dtype
        return DTYPES[sent] if sent else _dtype_of(self.native)

    def postscale_gradients(self) -> bool:
        """Return the opposite of the JSON's ``prescale_gradients``."""
        return not _written(self, "prescale_gradients", False)

    def zero_overlap_comm(self) -> bool:
        """Return the JSON's ``overlap_comm``; without it whether the stage is 3, as in DeepSpeed."""
        return bool(_written(self, "zero_optimization.overlap_comm", self.native.stage == 3))

    def zero_offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """Return the JSON's section ``offload_optimizer``."""
        tier = self.native.offload.optimizer
        return _offload_section(self, DeepSpeedZeroOffloadOptimizerConfig, "offload_optimizer", tier)

    def zero_offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """Return the JSON's section ``offload_param``."""
        tier = self.native.offload.params
        return _offload_section(self, DeepSpeedZeroOffloadParamConfig, "offload_param", tier)


_OffloadSection = TypeVar("_OffloadSection", bound=_Section)


def _offload_section(
    asked: SettingsQuestions, kind: type[_OffloadSection], name: str, tier: str
) -> _OffloadSection | None:
    """Return a section of the JSON; of one that does not have it the device of ``tier``, if it is another."""
    found = (asked.config.get("zero_optimization") or {}).get(name)
    if found is None and tier != "device":
        found = {"device": _DEVICES.get(tier, tier)}
    return None if found is None else kind(**{key: value for key, value in found.items() if value != AUTO})


def _written(asked: SettingsQuestions, path: str, default: Any) -> Any:
    """Return the value in force of a key of the JSON, if it has one in this stage, else what is written,
    else ``default``."""
    key, written = KEYS[path], dict(flattened(asked.config))
    if key.native and asked.native.stage in key.stages:
        return attrgetter(key.native)(asked.native)
    said = (written.get(each) for each in (key.path, *key.aliases))
    return next((value for value in said if value not in (None, AUTO)), default)


def _method(name: str, doc: str, answer: Callable[[SettingsQuestions], Any]) -> Callable[[Any], Any]:
    """Return a method without arguments."""

    def method(self: SettingsQuestions) -> Any:
        return answer(self)

    method.__name__, method.__doc__ = name, doc
    return method


def _fixed(value: Any, asked: object) -> Any:
    return value


def _of_native(answer: str | Callable[[ZeroConfig], Any]) -> Callable[[SettingsQuestions], Any]:
    get = attrgetter(answer) if isinstance(answer, str) else answer
    return lambda asked: get(asked.native)


for _name, _answer in _IN_FORCE.items():
    _found = _method(_name, "Return it of the configuration in force.", _of_native(_answer))
    setattr(SettingsQuestions, _name, _found)
for _name, (_path, _default) in _WRITTEN.items():
    _get = partial(_written, path=_path, default=_default)
    setattr(SettingsQuestions, _name, _method(_name, f"Return ``{_path}`` of the JSON.", _get))
for _name, _value in _FIXED.items():
    setattr(SettingsQuestions, _name, property(partial(_fixed, _value), doc=f"{_value}, always."))


class DeepSpeedConfig:
    """A checked configuration. ``values`` is the JSON as given, ``native`` what it means here.

    Raises :class:`DeepSpeedConfigError` (``zero_ext.ConfigError``) listing all that is wrong with it.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | Path, mpu: object = None, mesh_device: object = None
    ) -> None:
        del mpu, mesh_device  # without model parallelism every rank is a data-parallel one
        translation = load_deepspeed_config(config)
        self.values = self.config = json_values("DeepSpeedConfig", config)
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
        fields = DeepSpeedZeroConfig.model_fields.items()
        known = {name for field, info in fields for name in (field, info.alias)}
        return {key: value for key, value in section.items() if key in known and value != AUTO}


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to ``parser`` and return it."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine; read by the script alone")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of DeepSpeed's JSON")
    return parser


def check_others(
    what: str, others: Mapping[str, Any], refused: Mapping[str, str], ignored: Iterable[str]
) -> None:
    """Look at the arguments of DeepSpeed's that ``what`` takes and does not use.

    Raises:
        TypeError: DeepSpeed has no such argument.
        DeepSpeedFeatureError: one is given that is refused, with the reason or what to do instead.
    """
    known = (*refused, *ignored)
    for name, value in others.items():
        if name not in known:
            raise TypeError(
                f"{what}: expected its own arguments or {', '.join(known)}, got {name!r}. Leave it out."
            )
        if name in refused and value is not None and value is not False:
            raise DeepSpeedFeatureError(
                f"{what}({name}=...): it is not supported: {refused[name]}. Leave it out."
            )


def json_values(what: str, source: Any) -> dict[str, Any]:
    """DeepSpeed's JSON, from a mapping, a path or an object with it, like ``DeepSpeedConfig``, as ``values``.

    Raises:
        ConfigError: a file that cannot be read or holds no JSON object.
        TypeError: something else was given; ``what`` names it.
    """
    if isinstance(source, str | Path):
        return read_config_file(source)
    found = source if isinstance(source, Mapping) else getattr(source, "values", None)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{what}: expected a mapping, a path or a DeepSpeedConfig, got {show(source)}. Pass one of them."
        )
    return dict(found)
