"""The groups of settings that a ZeroConfig is made of. Every default means "off" or "as torch does it"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from zero_ext.config.optimizer_names import optimizer_name, scheduler_name
from zero_ext.config.schema.base_section import ConfigSection, Count, KeyProblem, Names, Positive
from zero_ext.config.schema.config_errors import wrong_value
from zero_ext.config.schema.number_checks import is_number

from .communication import Reduction

_DEEPEST_PARAMS = 8
ParameterDtype = Literal["fp32", "bf16", "fp16"]
TagValidation = Literal["ignore", "warn", "fail"]


class PrecisionConfig(ConfigSection):
    """Numeric formats.

    Attributes:
        dtype: compute precision of parameters and their gathered copies; "keep" leaves every parameter as
            it is.
        grad_accum_dtype: precision in which gradients of several micro-batches add up.
        moments_dtype: precision of Adam's two moments (masters are always fp32). "8bit" quantizes blocks
            of 256 elements (Dettmers et al., arXiv 2110.02861); checkpoints hold them as float32.
        communication_dtype: precision of gradients on the wire; None sends a gradient in its own.
        reduction: how the ranks' gradients are added up. "rank_order": each rank adds those of its shard in
            float32 and in the order of the ranks, so the result does not depend on how they are grouped.
            "node_order": the same inside each node, and then over the nodes in their order, with one rounding
            to the precision on the wire in between. Each node then sends no more to others than a ring does.
            "backend": NCCL adds, in the precision on the wire and an order of its own. "auto": on a device
            with NCCL "node_order" where ranks are on several nodes, "rank_order" on one, and "backend" where
            a node or the nodes are more than 256; in host memory "rank_order".
    """

    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    grad_accum_dtype: ParameterDtype = "fp32"
    moments_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    communication_dtype: ParameterDtype | None = None
    reduction: Reduction = "auto"


class LossScaleConfig(ConfigSection):
    """Loss scaling, used with fp16 parameters only.

    Source: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), section 3.2.

    Attributes:
        static: a fixed scale; 0 means dynamic, and then the other keys apply.
        initial_power: the dynamic scale starts at 2**initial_power.
        window: steps without overflow after which the scale doubles.
        hysteresis: the scale halves at the overflow of this number; those before it only skip their step.
        consecutive_hysteresis: refill the tolerance after every step without overflow, not only when the
            scale grows.
        minimum: the dynamic scale never goes below this.
    """

    static: Annotated[float, Field(ge=0, le=2.0**126)] = 0.0
    initial_power: Annotated[Count, Field(le=126)] = 16
    window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    minimum: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _starts_above_minimum(self) -> LossScaleConfig:
        if self.static == 0 and self.minimum > 2.0**self.initial_power:
            raise KeyProblem(
                "minimum",
                f"expected at most the initial scale 2**initial_power = {2.0**self.initial_power:g}, got "
                f"{self.minimum}. Lower minimum or raise initial_power.",
            )
        return self


class UnitConfig(ConfigSection):
    """Grouping of parameters into units, and limits of gathered ones, in elements.

    Attributes:
        block_classes: class names with modules that each form a unit in stage 3; empty takes the entries of
            ModuleList and Sequential stacks.
        leaf_modules: class or module names that are gathered whole, with all they contain (mixture of
            experts).
        tiles: number of tiles for nn.Linear and nn.Embedding modules, by module or class name: in stage 3
            each is replaced by a tiled one, and one tile after another is gathered. Saved under the
            same names.
        bucket_elements: size of a unit in stages 1 and 2.
        persistence_threshold: parameters with fewer elements stay gathered in stage 3.
        max_live_elements: cap on gathered elements at any time in stage 3.
        prefetch_elements: elements gathered ahead of their use in stage 3; at least the next unit, unless 0.
        reuse_elements: in stage 3 a unit stays gathered after its use if no more elements are used before it
            is needed again, and `max_live_elements` allows; twice the model's elements keep all of them from
            forward to backward, which sends what stage 2 sends. What is needed next stays in any case.
    """

    block_classes: Names = ()
    leaf_modules: Names = ()
    tiles: dict[Annotated[str, Field(min_length=1)], Positive] = Field(default_factory=dict)
    bucket_elements: Positive = 16_777_216
    persistence_threshold: Count = 0
    max_live_elements: Positive = 1_000_000_000
    prefetch_elements: Count = 8_388_608
    reuse_elements: Count = 0


def _check_json(value: object, path: str, depth: int = 0) -> None:
    if value is None or isinstance(value, bool | str) or is_number(value):
        return
    if depth == _DEEPEST_PARAMS:
        raise KeyProblem(
            path, f"expected at most {_DEEPEST_PARAMS} nested levels, got more. Flatten the value."
        )
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{path}.{index}", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_json(item, f"{path}.{key}", depth + 1)
    else:
        raise KeyProblem(path, wrong_value("a finite number, string, bool, null or a list of those", value))


class _TypeWithParams(ConfigSection):
    type: Annotated[str, Field(min_length=1)]
    params: dict[str, Any] = Field(default_factory=dict)

    @field_validator("params")
    @classmethod
    def _params_are_json(cls, params: dict[str, Any]) -> dict[str, Any]:
        for key, value in params.items():
            _check_json(value, key)
        return params


class OptimizerConfig(_TypeWithParams):
    """The optimizer that `initialize` builds.

    Attributes:
        type: the name of a torch optimizer or of one of `zero_ext`'s (Lamb, Lion, OneBitAdam, OneBitLamb,
            ZeroOneAdam) in any case, kept in its proper one. "Adam" means AdamW, as in DeepSpeed, unless
            params hold adam_w_mode (or adamw) false.
        params: its keyword arguments.
    """

    @field_validator("type")
    @classmethod
    def _canonical_type(cls, name: str) -> str:
        return optimizer_name(name)


class SchedulerConfig(_TypeWithParams):
    """The learning-rate scheduler that `initialize` builds.

    Attributes:
        type: one of DeepSpeed's five or a torch scheduler's name, in any case, kept in its proper one.
        params: its keyword arguments.
    """

    @field_validator("type")
    @classmethod
    def _canonical_type(cls, name: str) -> str:
        return scheduler_name(name)


class CheckpointConfig(ConfigSection):
    """Defaults of `save_checkpoint`.

    Attributes:
        keep_last: number of checkpoints kept; None keeps all.
        async_save: write in the background after one host copy.
        tag_validation: what happens if ranks save to different directories (DeepSpeed: under different tags).
            "warn" and "ignore" use rank 0's, with and without a warning. "fail" raises on all ranks before
            anything is written.
    """

    keep_last: Positive | None = None
    async_save: bool = False
    tag_validation: TagValidation = "warn"
