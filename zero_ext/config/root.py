"""The whole configuration of one engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from .batch import BatchPolicy
from .policies import (
    CheckpointPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    PrecisionPolicy,
    SchedulerPolicy,
    UnitPolicy,
)
from .policy import Count, KeyProblem, Policy, Positive, whole


class ZeroConfig(Policy):
    """Typed configuration. Frozen; build it from keywords, or with `load_config` from a mapping or a JSON
    file.

    Attributes:
        stage: ZeRO stage. 0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also
            parameters (Rajbhandari et al., ZeRO, section 5).
        precision, loss_scale, units, batch, checkpoint: groups of settings, see their classes.
        optimizer, scheduler: what `initialize` builds when the caller passes none.
        gradient_clipping: largest global gradient norm; 0 means no clipping.
        timeout_seconds: longest wait for a collective before the job is ended with the rank's name.
        steps_per_print: steps between progress lines; None prints none.
        seed: seed of the data order that `initialize(training_data=...)` uses.
    """

    stage: Annotated[int, BeforeValidator(whole), Field(ge=0, le=3)] = 3
    precision: PrecisionPolicy = PrecisionPolicy()
    loss_scale: LossScalePolicy = LossScalePolicy()
    units: UnitPolicy = UnitPolicy()
    batch: BatchPolicy = BatchPolicy()
    optimizer: OptimizerPolicy | None = None
    scheduler: SchedulerPolicy | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    timeout_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 600.0
    steps_per_print: Positive | None = None
    seed: Count = 0

    @model_validator(mode="after")
    def _loss_scale_has_a_use(self) -> ZeroConfig:
        if self.precision.dtype in ("fp32", "bf16") and self.loss_scale != LossScalePolicy():
            raise KeyProblem(
                "loss_scale",
                f"set, but precision.dtype is {self.precision.dtype!r} and loss scaling acts on fp16 only; "
                "remove loss_scale or set precision.dtype to 'fp16'",
            )
        return self
