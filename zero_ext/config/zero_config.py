"""The whole configuration of one engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator
from typing_extensions import Self

from zero_ext.config.activation_checkpointing import ActivationCheckpointingConfig
from zero_ext.config.base_section import ConfigSection, Count, KeyProblem, Positive, as_integer
from zero_ext.config.communication import CommunicationConfig
from zero_ext.config.config_errors import show
from zero_ext.config.monitoring import MonitorConfig
from zero_ext.config.offload import AioConfig, OffloadConfig
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.sparse_attention import SparseAttentionConfig
from zero_ext.config.training import (
    BatchConfig,
    CheckpointConfig,
    LossConfig,
    LossScaleConfig,
    MlpConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SchedulerConfig,
    UnitConfig,
)

# Keys that act on shards: section, key, the first stage that has these shards, and why.
_ACT_ON_SHARDS = (
    ("communication", "quantized_weights", 3, "parameters are gathered from their shards in stage 3 only"),
    ("communication", "quantized_gradients", 2, "gradients are sharded from stage 2 on"),
    ("communication", "hierarchical_partition", 3, "parameters are sharded in stage 3 only"),
    ("communication", "shard_group_size", 3, "groups share parameters, which are sharded in stage 3 only"),
    ("offload", "optimizer", 1, "optimizer state can leave the device only when sharded"),
    ("offload", "grads", 2, "gradients can leave the device only when sharded"),
    ("offload", "params", 3, "parameters can leave the device only when sharded"),
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
        loss: computation of the loss in chunks of tokens, which `prepare` sets in causal language models of
            transformers. `null` leaves the loss unchanged.
        parallel: sequences and experts over ranks, for `ZeroTrainer` and `ZeroAccelerator`.
        mlp: computation of feed-forward networks in chunks of tokens, each recomputed in backward, which
            `prepare` sets in models of transformers. `null` leaves them unchanged.
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
    loss: LossConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    mlp: MlpConfig | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    check_finite: bool = True
    timeout_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 600.0
    steps_per_print: Positive | None = None
    monitor: MonitorConfig | None = None
    seed: Count = 0

    # Whether the environment's settings are in it, which are not applied again.
    _in_force: bool = PrivateAttr(default=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZeroConfig) and self.__dict__ == other.__dict__

    def replace(self, **changes: object) -> Self:
        """Return a copy with some settings changed, checked as a new one would be.

        Args:
            **changes: new values of fields.

        Returns:
            The copy.
        """
        found = super().replace(**changes)
        found._in_force = self._in_force
        return found

    @property
    def in_force(self) -> bool:
        """True if the environment's settings are in it."""
        return self._in_force

    def put_in_force(self) -> Self:
        """Mark a copy as having the environment's settings.

        Returns:
            The copy.
        """
        found = self.model_copy()
        found._in_force = True
        return found

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
    def _only_shards_are_compressed_and_moved(self) -> ZeroConfig:
        for section, key, least, why in _ACT_ON_SHARDS:
            value = getattr(getattr(self, section), key)
            if value and value != "device" and self.stage < least:
                wanted = " or ".join(map(str, range(least, 4)))
                idle = f"set {key} to 'device'" if section == "offload" else f"remove {key}"
                raise KeyProblem(
                    f"{section}.{key}",
                    f"got {show(value)}, but stage is {self.stage} and {why}. Set stage to {wanted}, or "
                    f"{idle}.",
                )
        return self

    @model_validator(mode="after")
    def _only_exact_shards_are_routed(self) -> ZeroConfig:
        if self.units.experts == "all":
            return self
        if self.stage < 3:
            raise KeyProblem(
                "units.experts",
                f"got {show(self.units.experts)}, but stage is {self.stage} and parameters are gathered in "
                "stage 3 only. Set stage to 3, or remove experts.",
            )
        for key in ("quantized_weights", "hierarchical_partition", "shard_group_size"):
            value = getattr(self.communication, key)
            if value:
                raise KeyProblem(
                    "units.experts",
                    f"got {show(self.units.experts)} together with communication.{key} = {show(value)}. Some "
                    f"experts are gathered from shards of all ranks only. Remove {key}, or remove experts.",
                )
        return self

    @model_validator(mode="after")
    def _skipped_experts_keep_their_moments(self) -> ZeroConfig:
        if self.units.update_experts == "routed" and self.precision.moments_dtype == "8bit":
            raise KeyProblem(
                "units.update_experts",
                "got 'routed' together with precision.moments_dtype = '8bit'. Moments of two experts share a "
                "block of 8-bit codes, and a step of one would round those of the other. Set moments_dtype "
                "to 'fp32' or 'bf16', or remove update_experts.",
            )
        return self

    @model_validator(mode="after")
    def _one_bit_needs_replicas(self) -> ZeroConfig:
        if self.optimizer is not None:
            check_one_bit(self.optimizer.type, self.stage, self.offload, self.precision)
        return self


def check_one_bit(name: str, stage: int, offload: OffloadConfig, precision: PrecisionConfig) -> None:
    """Raise ``KeyProblem`` if ``name`` is a 1-bit optimizer that cannot run with these settings."""
    stages = OPTIMIZERS[name].one_bit_stages if name in OPTIMIZERS else ()
    if not stages:
        return
    if stage not in stages:
        wanted = " or ".join(map(str, stages))
        sharded = "gradients are" if stage == 2 else "gradients and parameters are"
        why = (
            "It reads norms and extremes of full parameters in every step, which shards do not have."
            if stage == 1
            else "It compresses full gradients of replicated parameters, and in "
            f"stage {stage} {sharded} sharded."
        )
        raise KeyProblem(
            "stage",
            f"expected {wanted} with {name}, got {stage}. {why} Set stage to {wanted}, or use AdamW with "
            f"stage {stage}.",
        )
    for key, value, wanted in (
        ("offload.optimizer", offload.optimizer, "device"),
        ("offload.update_mode", offload.update_mode, "after_backward"),
        ("precision.moments_dtype", precision.moments_dtype, "fp32"),
    ):
        if value != wanted:
            raise KeyProblem(
                key,
                f"expected {wanted!r} with {name}, got {value!r}. It compresses float32 state on the "
                f"device once all gradients are ready. Set it to {wanted!r}, or use AdamW.",
            )
