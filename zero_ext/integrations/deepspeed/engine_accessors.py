"""The questions that DeepSpeed's engine answers about its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_ext.config import ZeroConfig
from zero_ext.config.training import OptimizerConfig, SchedulerConfig
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.construction.grouping import DTYPES


def _question(doc: str, answer: Callable[[ZeroConfig], Any]) -> Callable[[Any], Any]:
    """Return a method without arguments that returns a value of the native configuration."""

    def ask(self: SettingsQuestions) -> Any:
        return answer(self.native)

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
        "Samples of one optimizer step over all ranks; None if nobody said.",
        lambda native: native.batch.train_batch_size,
    )
    train_micro_batch_size_per_gpu = _question(
        "Samples of one forward on one rank; None if nobody said.",
        lambda native: native.batch.micro_batch_size,
    )
    gradient_accumulation_steps = _question(
        "Micro-batches of one optimizer step.", lambda native: native.batch.gradient_accumulation_steps
    )
    zero_optimization = _question("Whether anything is sharded.", lambda native: native.stage > 0)
    zero_optimization_stage = _question("The ZeRO stage.", lambda native: native.stage)
    zero_optimization_partition_gradients = _question(
        "Whether gradients are sharded.", lambda native: native.stage >= 2
    )
    zero_optimization_partition_weights = _question(
        "Whether parameters are sharded.", lambda native: native.stage == 3
    )
    zero_gather_16bit_weights_on_model_save = _question(
        "Always: whole weights can be had at every stage, whatever the JSON says.", lambda native: True
    )
    gradient_clipping = _question(
        "The largest gradient norm; 0 for none.", lambda native: native.gradient_clipping
    )
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
    steps_per_print = _question(
        "Steps between progress lines; None for none.", lambda native: native.steps_per_print
    )
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
        return self._section("offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        """Return the JSON's ``offload_param`` section."""
        return self._section("offload_param")

    def _section(self, name: str) -> dict[str, Any] | None:
        found = (self.config.get("zero_optimization") or {}).get(name)
        return None if found is None else dict(found)
