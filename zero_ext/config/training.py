"""Sections of a ZeroConfig for training. Every default means "off" or the behavior of torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from zero_ext.config.base_section import (
    LARGEST_COUNT,
    ConfigSection,
    Count,
    KeyProblem,
    Names,
    Positive,
    as_integer,
    is_number,
)
from zero_ext.config.communication import Reduction
from zero_ext.config.config_errors import ConfigError, Problem, nearest, show, wrong_value
from zero_ext.config.optimizer_traits import OPTIMIZERS, UNSUPPORTED_OPTIMIZERS

_DEEPEST_PARAMS = 8
ParameterDtype = Literal["fp32", "bf16", "fp16"]
TagValidation = Literal["ignore", "warn", "fail"]


class PrecisionConfig(ConfigSection):
    """Numeric formats.

    Attributes:
        dtype: compute precision of parameters and their gathered copies. "keep" leaves the dtype of every
            parameter unchanged.
        grad_accum_dtype: precision in which gradients of several micro-batches are accumulated.
        moments_dtype: precision of Adam's two moments. "8bit" quantizes blocks of 256 elements (Dettmers et
            al., arXiv 2110.02861), and checkpoints store them as float32. Master weights are always fp32.
        communication_dtype: precision in which gradients are sent. `null` sends each gradient in its own
            dtype.
        reduction: algorithm that sums gradients across ranks. "rank_order" sums the gradients of each shard
            in float32 in the order of the ranks, so the result does not depend on how ranks are grouped.
            "node_order" does the same inside each node and then over the nodes in their order, with one
            rounding to the communication precision in between, and a node sends no more to other nodes than
            in a ring. "backend" uses NCCL's sum, in the communication precision and NCCL's own order. "auto"
            on a device with NCCL selects "node_order" for several nodes with several ranks each, "backend"
            for more than 256 nodes or more than 256 ranks per node, and otherwise "rank_order". "auto" in
            host memory selects "rank_order".
    """

    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    grad_accum_dtype: ParameterDtype = "fp32"
    moments_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    communication_dtype: ParameterDtype | None = None
    reduction: Reduction = "auto"


def _as_chunk(value: object) -> object:
    """Check both types of a chunk's size here, because pydantic reports a problem for each of a union."""
    found = as_integer(value)
    if found == "auto" or (type(found) is int and 1 <= found <= LARGEST_COUNT):
        return found
    raise ValueError(wrong_value("'auto' or an integer of at least 1", value))


class LossConfig(ConfigSection):
    """Loss of causal language models of transformers, computed in chunks of tokens while they train.

    Attributes:
        chunk_tokens: largest number of tokens with logits in memory simultaneously. "auto" computes it from
            128 MiB.
    """

    chunk_tokens: Annotated[Literal["auto"] | Positive, BeforeValidator(_as_chunk)] = "auto"


class ParallelConfig(ConfigSection):
    """Sequences and experts over ranks, in `ZeroTrainer` and `ZeroAccelerator`.

    The models are those of transformers. The remaining factor of the ranks trains on other samples.

    Attributes:
        cp: number of ranks that a sequence is sharded over.
        ring: number of these ranks that keys and values rotate over, a divisor of `cp` (ring attention).
            Groups of `cp` / `ring` ranks exchange heads (DeepSpeed-Ulysses).
        ep: number of ranks that experts are spread over. With `ep` over 1 `cp` is 1.
    """

    cp: Positive = 1
    ring: Positive = 1
    ep: Positive = 1

    @model_validator(mode="after")
    def _lengths_match(self) -> ParallelConfig:
        if self.cp % self.ring:
            raise KeyProblem(
                "ring",
                f"expected a divisor of parallel.cp ({self.cp}), got {self.ring}. Set it to a divisor.",
            )
        if self.cp > 1 and self.ep > 1:
            raise KeyProblem(
                "ep",
                f"expected 1 with parallel.cp {self.cp}, got {self.ep}. Set one of the two to 1.",
            )
        return self


class MlpConfig(ConfigSection):
    """Feed-forward networks in the blocks of transformers' models, computed in chunks of tokens.

    Attributes:
        chunk_tokens: largest number of tokens with intermediates in memory simultaneously. "auto" is the
            width of the blocks, at least 256.
    """

    chunk_tokens: Annotated[Literal["auto"] | Positive, BeforeValidator(_as_chunk)] = "auto"


class LossScaleConfig(ConfigSection):
    """Loss scaling, used with fp16 parameters only.

    Source: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), section 3.2.

    Attributes:
        static: fixed loss scale. 0 means a dynamic scale, to which the other keys of this section apply.
        initial_power: power of two of the initial dynamic scale, which is 2**initial_power.
        window: number of steps without overflow after which the dynamic scale doubles.
        hysteresis: number of the overflow at which the dynamic scale halves. Earlier overflows only skip
            their step. The count is reset when the scale grows.
        consecutive_hysteresis: whether to reset the count of `hysteresis` after every step without overflow,
            not only when the scale grows.
        minimum: smallest dynamic scale.
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
    """Grouping of parameters into units, and limits on gathered parameters, in elements.

    Attributes:
        block_classes: class names of modules. Each module of these classes forms one unit in stage 3. An
            empty list selects the entries of ModuleList and Sequential stacks.
        leaf_modules: names of classes or modules that are gathered in full with all their submodules, as for
            mixture of experts.
        tiles: number of tiles of nn.Linear and nn.Embedding modules, by module or class name. Stage 3
            replaces each of these modules with a tiled one and gathers one tile at a time. Checkpoints have
            the same names with and without tiles.
        bucket_elements: largest size of a unit in stages 0 to 2, in elements. It also limits the units of
            parameters below `persistence_threshold` in stage 3. A larger parameter is a unit of its own.
        persistence_threshold: number of elements below which a parameter stays gathered in stage 3.
        max_live_elements: largest number of gathered elements at any time in stage 3. A unit above this limit
            is gathered alone, with a warning.
        prefetch_elements: number of elements to gather ahead of their use in stage 3. The next unit is always
            gathered ahead, unless this is 0.
        reuse_elements: largest number of elements used between two uses of a unit for which the unit stays
            gathered in stage 3, if `max_live_elements` allows it. Twice the elements of the model keep all
            units gathered from forward to backward, which results in the traffic of stage 2. The unit that is
            needed next stays gathered in any case.
        experts: experts that a mixture of transformers gathers in stage 3. "all" gathers the weights of all
            experts. "routed" gathers those that the tokens of any rank are routed to, in forward and again in
            backward.
        update_experts: experts of these mixtures that an optimizer step updates. "all" updates all of them.
            "routed" leaves out those that no token of any rank has reached since the gradients were cleared:
            their weights and moments stay as they are, without weight decay. It requires `experts` "routed",
            and Adam, AdamW or Lion.
    """

    block_classes: Names = ()
    leaf_modules: Names = ()
    tiles: dict[Annotated[str, Field(min_length=1)], Positive] = Field(default_factory=dict)
    bucket_elements: Positive = 16_777_216
    persistence_threshold: Count = 0
    max_live_elements: Positive = 1_000_000_000
    prefetch_elements: Count = 8_388_608
    reuse_elements: Count = 0
    experts: Literal["all", "routed"] = "all"
    update_experts: Literal["all", "routed"] = "all"

    @model_validator(mode="after")
    def _only_routed_experts_are_skipped(self) -> UnitConfig:
        if self.update_experts == "routed" and self.experts != "routed":
            raise KeyProblem(
                "update_experts",
                f"expected 'all' with units.experts {show(self.experts)}, got 'routed': steps leave out "
                "experts only where they are gathered one by one. Set experts to 'routed', or remove "
                "update_experts.",
            )
        return self


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
        type: name of a torch optimizer or of a `zero_ext` optimizer (Lamb, Lion, Muon, OneBitAdam,
            OneBitLamb, ZeroOneAdam). Upper and lower case are equivalent, and the canonical name is stored.
            "Adam" means AdamW, as in DeepSpeed, unless params set adam_w_mode (or adamw) to false.
        params: keyword arguments of the optimizer. Those of Muon, with a mapping `adamw`, are on the page
            about it.
    """

    @field_validator("type")
    @classmethod
    def _canonical_type(cls, name: str) -> str:
        return _canonical_name("optimizer", name, OPTIMIZERS, UNSUPPORTED_OPTIMIZERS)


class SchedulerConfig(_TypeWithParams):
    """The learning-rate scheduler that `initialize` builds.

    Attributes:
        type: name of one of DeepSpeed's five schedulers or of a torch scheduler. Upper and lower case are
            equivalent, and the canonical name is stored.
        params: keyword arguments of the scheduler.
    """

    @field_validator("type")
    @classmethod
    def _canonical_type(cls, name: str) -> str:
        return _canonical_name("scheduler", name, SCHEDULERS, UNSUPPORTED_SCHEDULERS)


class CheckpointConfig(ConfigSection):
    """Defaults of `save_checkpoint`.

    Attributes:
        keep_last: number of most recent checkpoints to keep. `null` keeps all.
        async_save: whether to write checkpoints in the background, after one copy to host memory.
        tag_validation: what happens if ranks save to different directories (DeepSpeed: under different tags).
            "warn" and "ignore" use rank 0's, with and without a warning. "fail" raises on all ranks before
            anything is written.
    """

    keep_last: Positive | None = None
    async_save: bool = False
    tag_validation: TagValidation = "warn"


class BatchConfig(ConfigSection):
    """Sizes of batches: train_batch_size = micro_batch_size x gradient_accumulation_steps x world size.

    Any two determine the third (`resolve`). None means that a size is not set. An accumulation left at its
    default is not set either, and `to_mapping` leaves it out.

    Attributes:
        train_batch_size: number of samples per optimizer step over all ranks.
        micro_batch_size: number of samples per forward pass on one rank.
        gradient_accumulation_steps: number of micro-batches per optimizer step.
        drop_last: whether to leave out the samples at the end of an epoch that do not fill a micro-batch of
            all ranks. False fills that micro-batch with the first samples of the next epoch.
        managed_gradient_accumulation: whether `step()` of the engine of `zero_ext.initialize` counts
            micro-batches and updates at the last one of a step. False: it updates at every call.
    """

    train_batch_size: Positive | None = None
    micro_batch_size: Positive | None = None
    gradient_accumulation_steps: Positive = 1
    drop_last: bool = False
    managed_gradient_accumulation: bool = True

    @model_serializer(mode="wrap")
    def _omit_implicit_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if self._explicit_steps() is None:
            values.pop("gradient_accumulation_steps", None)
        return values

    def resolve(self, world_size: int) -> BatchConfig:
        """Compute the sizes that are not set.

        Args:
            world_size: data-parallel ranks.

        Returns:
            A new section. The two sizes stay None when neither is given.

        Raises:
            ConfigError: the three values contradict each other or do not divide.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                Problem(
                    "world_size",
                    f"expected an integer of at least 1, got {world_size!r}. Pass the number of ranks.",
                )
            )
        train, micro, steps = self.train_batch_size, self.micro_batch_size, self._explicit_steps()
        if train is None:
            steps = steps or 1
            train = None if micro is None else micro * steps * world_size
        elif micro is not None:
            steps = steps or train // (micro * world_size)
        else:
            steps = steps or 1
            micro = train // (steps * world_size)
        if train is not None and (not micro or not steps or train != micro * steps * world_size):
            raise ConfigError(Problem("train_batch_size", self._contradiction(world_size)), "batch sizes")
        return self.replace(train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=steps)

    def _explicit_steps(self) -> int | None:
        said = "gradient_accumulation_steps" in self.model_fields_set
        return self.gradient_accumulation_steps if said else None

    def _contradiction(self, world_size: int) -> str:
        return (
            "expected train_batch_size = micro_batch_size x gradient_accumulation_steps x ranks in "
            f"integers, got train_batch_size={self.train_batch_size}, "
            f"micro_batch_size={self.micro_batch_size}, "
            f"gradient_accumulation_steps={self._explicit_steps()} on {world_size} rank(s). Change one of "
            "them, or leave one out."
        )


SCHEDULERS = (
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "OneCycle",
    "LRRangeTest",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
_OBJECTS = "It needs Python objects, which a configuration cannot hold. Build it and pass it as lr_scheduler"
UNSUPPORTED_SCHEDULERS = {
    "ReduceLROnPlateau": "Its step() needs a metric, and the engine's step has none. Call it yourself",
    "LambdaLR": _OBJECTS,
    "MultiplicativeLR": _OBJECTS,
    "SequentialLR": _OBJECTS,
    "ChainedScheduler": _OBJECTS,
    "SWALR": _OBJECTS,
}


def _canonical_name(what: str, written: str, known: Collection[str], unsupported: dict[str, str]) -> str:
    by_lower = {name.lower(): name for name in (*known, *unsupported)}
    name = by_lower.get(written.lower())
    if name is not None and name in known:
        return name
    if name is not None:
        raise KeyProblem("", f"expected a supported {what}, got {name}. {unsupported[name]}.")
    close = nearest(written.lower(), by_lower)
    hint = f"Did you mean {by_lower[close]}?" if close else f"Choose one of {', '.join(known)}."
    raise KeyProblem("", f"expected a known {what}, got {show(written)}. {hint}")
