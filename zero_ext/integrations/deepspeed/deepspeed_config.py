"""``deepspeed.runtime.config``: DeepSpeed's JSON as an object that is asked by attribute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.config_errors import show
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.training import OptimizerConfig, SchedulerConfig
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


# What DeepSpeed calls the tiers of a native configuration.
_DEVICES = {"host": "cpu"}


def _question(doc: str, answer: str | Callable[[ZeroConfig], Any]) -> Callable[[Any], Any]:
    """Return a method without arguments that returns a value of the native configuration, or what is at a
    path of it."""
    of_native = attrgetter(answer) if isinstance(answer, str) else answer

    def ask(self: SettingsQuestions) -> Any:
        return of_native(self.native)

    ask.__doc__ = doc
    return ask


def _type(section: OptimizerConfig | SchedulerConfig | None) -> str | None:
    return None if section is None else section.type


def _params(section: OptimizerConfig | SchedulerConfig | None) -> dict[str, Any] | None:
    return None if section is None else dict(section.params)


class SettingsQuestions:
    """Methods named as DeepSpeed's engine has them; ``config`` is the JSON as it was given."""

    config: dict[str, Any]

    @property
    def native(self) -> ZeroConfig:
        """The native configuration in force, batch sizes resolved."""
        return engine_of(self).config  # type: ignore[arg-type]

    zero_config = native

    @property
    def world_size(self) -> int:
        """Ranks that share the state."""
        return engine_of(self).world_size  # type: ignore[arg-type]

    dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return engine_of(self).rank  # type: ignore[arg-type]

    train_batch_size = _question(
        "Samples of one optimizer step over all ranks; None if nobody said.", "batch.train_batch_size"
    )
    train_micro_batch_size_per_gpu = _question(
        "Samples of one forward on one rank; None if nobody said.", "batch.micro_batch_size"
    )
    gradient_accumulation_steps = _question(
        "Micro-batches of one optimizer step.", "batch.gradient_accumulation_steps"
    )
    zero_optimization = _question("Whether anything is sharded.", lambda native: native.stage > 0)
    zero_optimization_stage = _question("The ZeRO stage.", "stage")
    zero_optimization_partition_gradients = _question(
        "Whether gradients are sharded.", lambda native: native.stage >= 2
    )
    zero_optimization_partition_weights = _question(
        "Whether parameters are sharded.", lambda native: native.stage == 3
    )
    zero_gather_16bit_weights_on_model_save = _question(
        "Always: whole weights can be had at every stage, whatever the JSON says.", lambda native: True
    )
    gradient_clipping = _question("The largest gradient norm; 0 for none.", "gradient_clipping")
    fp16_enabled = _question(
        "Whether parameters compute in fp16.", lambda native: native.precision.dtype == "fp16"
    )
    bfloat16_enabled = _question(
        "Whether parameters compute in bf16.", lambda native: native.precision.dtype == "bf16"
    )
    dynamic_loss_scale = _question(
        "Whether the loss scale of fp16 follows overflows.",
        lambda native: native.precision.dtype == "fp16" and not native.loss_scale.static,
    )
    steps_per_print = _question("Steps between progress lines; None for none.", "steps_per_print")
    optimizer_name = _question(
        "The type of the JSON's optimizer section.", lambda native: _type(native.optimizer)
    )
    optimizer_params = _question("Its parameters.", lambda native: _params(native.optimizer))
    scheduler_name = _question(
        "The type of the JSON's scheduler section.", lambda native: _type(native.scheduler)
    )
    scheduler_params = _question("Its parameters.", lambda native: _params(native.scheduler))
    zero_cpu_offload = _question(
        "Whether optimizer state lives in host memory.", lambda native: native.offload.optimizer == "host"
    )

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Batch size, micro-batch size and accumulation steps."""
        batch = self.native.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of parameters, and that in which gradients of micro-batches add up."""
        precision = self.native.precision
        model = torch.float32 if precision.dtype == "keep" else DTYPES[precision.dtype]
        return model, DTYPES[precision.grad_accum_dtype]

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        """Return the JSON's ``offload_optimizer`` section."""
        return self._offload_section("offload_optimizer", self.native.offload.optimizer)

    def zero_offload_param(self) -> dict[str, Any] | None:
        """Return the JSON's ``offload_param`` section."""
        return self._offload_section("offload_param", self.native.offload.params)

    def _offload_section(self, name: str, tier: str) -> dict[str, Any] | None:
        """Return a section of the JSON as given; of other configurations the device of ``tier``."""
        found = (self.config.get("zero_optimization") or {}).get(name)
        if found is None and tier != "device":
            return {"device": _DEVICES.get(tier, tier)}
        return None if found is None else dict(found)


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
