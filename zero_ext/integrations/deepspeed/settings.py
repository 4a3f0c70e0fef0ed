"""The questions that DeepSpeed's engine answers about its configuration."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.config import ZeroConfig
from zero_ext.zero.lookup import engine_of
from zero_ext.zero.partition import DTYPES


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

    def train_batch_size(self) -> int | None:
        """Samples of one optimizer step over all ranks; None if nobody said."""
        return self.native.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of one forward on one rank; None if nobody said."""
        return self.native.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.native.batch.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Batch size, micro-batch size and accumulation steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.native.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.native.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.native.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.native.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always: whole weights can be had at every stage, whatever the JSON says."""
        return True

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 for none."""
        return self.native.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether parameters compute in fp16."""
        return self.native.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether parameters compute in bf16."""
        return self.native.precision.dtype == "bf16"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of parameters, and that in which gradients of micro-batches add up."""
        precision = self.native.precision
        model = torch.float32 if precision.dtype == "keep" else DTYPES[precision.dtype]
        return model, DTYPES[precision.grad_accum_dtype]

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale of fp16 follows overflows."""
        return self.fp16_enabled() and not self.native.loss_scale.static

    def steps_per_print(self) -> int | None:
        """Steps between progress lines; None for none."""
        return self.native.steps_per_print

    def optimizer_name(self) -> str | None:
        """The type that the JSON's optimizer section names."""
        return None if self.native.optimizer is None else self.native.optimizer.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """The parameters of the JSON's optimizer section."""
        return None if self.native.optimizer is None else dict(self.native.optimizer.params)

    def scheduler_name(self) -> str | None:
        """The type that the JSON's scheduler section names."""
        return None if self.native.scheduler is None else self.native.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """The parameters of the JSON's scheduler section."""
        return None if self.native.scheduler is None else dict(self.native.scheduler.params)

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        """The JSON's ``offload_optimizer`` section."""
        return self._section("offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        """The JSON's ``offload_param`` section."""
        return self._section("offload_param")

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state lives in host memory."""
        return self.native.offload.optimizer == "host"

    def _section(self, name: str) -> dict[str, Any] | None:
        found = (self.config.get("zero_optimization") or {}).get(name)
        return None if found is None else dict(found)
