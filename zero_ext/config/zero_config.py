"""The whole configuration of one engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from zero_ext.config.schema.base_section import ConfigSection, Count, KeyProblem, Positive, as_integer
from zero_ext.config.schema.config_errors import show
from zero_ext.config.sections.activation_checkpointing import ActivationCheckpointingConfig
from zero_ext.config.sections.batch_sizes import BatchConfig
from zero_ext.config.sections.communication import CommunicationConfig
from zero_ext.config.sections.monitoring import MonitorConfig
from zero_ext.config.sections.offload import AioConfig, OffloadConfig
from zero_ext.config.sections.sparse_attention import SparseAttentionConfig
from zero_ext.config.sections.training import (
    CheckpointConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    UnitConfig,
)

from .onebit_rules import check_one_bit

# The state kinds in the order in which stages 1 to 3 shard them, with the words for what is sharded.
_SHARDED_FROM = {
    "optimizer": (1, "optimizer state"),
    "grads": (2, "gradients"),
    "params": (3, "parameters"),
}
# Keys of `communication`, the first stage that they act in, and why.
_COMPRESSED_FROM = (
    ("quantized_weights", 3, "parameters are gathered from their shards in stage 3 only"),
    ("quantized_gradients", 2, "gradients are sharded from stage 2 on"),
    ("hierarchical_partition", 3, "parameters are sharded in stage 3 only"),
    ("shard_group_size", 3, "sharding groups share parameters, which are sharded in stage 3 only"),
)


class ZeroConfig(ConfigSection):
    """Typed configuration.

    Frozen. Build it from keywords, or with [`load_config`][zero_ext.load_config] from a mapping or a JSON
    file.

    Attributes:
        stage: ZeRO stage (Rajbhandari et al., ZeRO, section 5). 0 replicates everything, 1 shards optimizer
            state, 2 also gradients and 3 also parameters.
        precision: dtypes of parameters, gradients and moments, and the order in which gradients are summed.
        loss_scale: loss scaling of fp16.
        units: grouping of parameters into units, and limits on gathered elements.
        batch: batch sizes.
        communication: compression, nodes and sharding groups.
        offload: tier of each kind of state.
        aio: I/O settings for files on NVMe devices.
        checkpoint: defaults of `save_checkpoint`.
        activation_checkpointing: storage for backward of the calls that the model checkpoints with
            `zero_ext.checkpoint_activations`.
        optimizer: optimizer that `initialize` builds if the caller passes none.
        scheduler: learning-rate scheduler that `initialize` builds if the caller passes none.
        sparse_attention: layout of sparse attention, which `prepare` sets in a Hugging Face model. `null`
            leaves attention unchanged.
        gradient_clipping: largest global gradient norm. 0 disables clipping.
        check_finite: whether to refuse a step with NaN or infinity in its gradients, before anything changes
            and with the names of the parameters, and to report a step that leaves such values in weights or
            moments. False checks only where a gradient norm is computed anyway: for clipping and for the loss
            scale of fp16.
        timeout_seconds: longest wait for a collective, in seconds. The job then ends with an error that names
            the rank.
        steps_per_print: number of steps between progress lines. `null` prints none.
        monitor: records of the run. `null` writes none.
        seed: seed of the data order of `initialize(training_data=...)`.

    Examples:
        >>> config = zero_ext.ZeroConfig(stage=2, gradient_clipping=1.0)
        >>> config.replace(stage=3).stage
        3
    """

    stage: Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=3)] = 3
    precision: PrecisionConfig = PrecisionConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    units: UnitConfig = UnitConfig()
    batch: BatchConfig = BatchConfig()
    communication: CommunicationConfig = CommunicationConfig()
    offload: OffloadConfig = OffloadConfig()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    sparse_attention: SparseAttentionConfig | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    check_finite: bool = True
    timeout_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 600.0
    steps_per_print: Positive | None = None
    monitor: MonitorConfig | None = None
    seed: Count = 0

    @model_validator(mode="after")
    def _loss_scale_has_a_use(self) -> ZeroConfig:
        if self.precision.dtype in ("fp32", "bf16") and self.loss_scale != LossScaleConfig():
            raise KeyProblem(
                "loss_scale",
                f"it has no effect with precision.dtype {self.precision.dtype!r}, since loss scaling acts "
                "on fp16 only. Remove loss_scale or set precision.dtype to 'fp16'.",
            )
        return self

    @model_validator(mode="after")
    def _only_shards_are_compressed(self) -> ZeroConfig:
        for key, least, words in _COMPRESSED_FROM:
            value = getattr(self.communication, key)
            if value and self.stage < least:
                wanted = " or ".join(str(stage) for stage in range(least, 4))
                raise KeyProblem(
                    f"communication.{key}",
                    f"got {show(value)}, but stage is {self.stage} and {words}. Set stage to {wanted}, or "
                    f"remove {key}.",
                )
        return self

    @model_validator(mode="after")
    def _only_shards_are_moved(self) -> ZeroConfig:
        for kind, (needed, words) in _SHARDED_FROM.items():
            tier = getattr(self.offload, kind)
            if tier != "device" and self.stage < needed:
                wanted = " or ".join(str(stage) for stage in range(needed, 4))
                raise KeyProblem(
                    f"offload.{kind}",
                    f"got {show(tier)}, but stage is {self.stage} and {words} can leave the device only "
                    f"when sharded. Set stage to {wanted}, or leave {words} on the device.",
                )
        return self

    @model_validator(mode="after")
    def _one_bit_needs_replicas(self) -> ZeroConfig:
        if self.optimizer is not None:
            check_one_bit(self.optimizer.type, self.stage, self.offload, self.precision)
        return self
