"""The optimizers by name, with all that holds for them without torch.

Names in configurations, checks of ``ZeroConfig``, the translation of DeepSpeed's JSON, plans and the lazy
names of ``zero_ext`` follow from this table. The classes and their steps are in
:mod:`zero_ext.optim.optimizer_registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TORCH = "torch.optim"


@dataclass(frozen=True)
class OptimizerTraits:
    """An optimizer that runs on shards.

    Args:
        name: name of its class, which configurations and checkpoints use.
        module: module that its class is imported from.
        moments: state of its fused step besides the master weights, one value per element. Empty: its own
            code, which is element-wise, runs on the shards.
        stepper: module in `zero_ext.optim` and name of the class of its fused step, if it is in there.
        eight_bit: whether its moments may be quantized to 8 bits.
        on_nvme: how state on NVMe is stepped: by the op that also moves it, in chunks that the fused step
            reads, by the optimizer's own code, or not at all.
        unless: options of a param group that the op does not have. With one, its own code runs.
        moments_with: option of a param group that moments come with. Empty: they are always there.
        needs_norms: whether a step needs norms of full parameters of all ranks.
        factors: whether state has values for rows and columns of full matrices.
        whole_tensors: whether a step needs full tensors, each at one rank.
        skips_experts: whether a step can leave out experts of a stacked parameter (`units.update_experts`).
        rest: name of the optimizer that steps parameters which are no hidden matrices. Empty: it does itself.
        one_bit_stages: ZeRO stages in which it compresses to 1 bit. Empty: it is not a 1-bit optimizer.
        resumes_from: names of other optimizers with state that it takes over.
        deepspeed_builders: names of DeepSpeed's op builders for it.
        deepspeed_defaults: params that DeepSpeed sets and its class here does not.
    """

    name: str
    module: str = TORCH
    moments: tuple[str, ...] = ()
    stepper: str = ""
    eight_bit: bool = False
    on_nvme: Literal["pipeline", "chunks", "own code", "never"] = "own code"
    unless: tuple[str, ...] = ("differentiable",)
    moments_with: str = ""
    needs_norms: bool = False
    factors: bool = False
    whole_tensors: bool = False
    skips_experts: bool = False
    rest: str = ""
    one_bit_stages: tuple[int, ...] = ()
    resumes_from: frozenset[str] = frozenset()
    deepspeed_builders: tuple[str, ...] = ()
    deepspeed_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def planned_moments(self) -> tuple[str, ...]:
        """Moments without options, which plans count."""
        return () if self.moments_with else self.moments


_TWO = ("exp_avg", "exp_avg_sq")
_OF_TWO_MOMENTS = frozenset({"Adam", "AdamW", "OneBitAdam", "ZeroOneAdam"})
_ADAM: dict[str, Any] = {
    "moments": _TWO,
    "stepper": "fused.AdamStepper",
    "eight_bit": True,
    "on_nvme": "pipeline",
    "unless": ("amsgrad", "differentiable"),
    "skips_experts": True,
    "deepspeed_defaults": {"lr": 1e-3, "weight_decay": 0.0},
}
_LAMB: dict[str, Any] = {"on_nvme": "chunks", "needs_norms": True, "deepspeed_builders": ("fused_lamb",)}
_MOMENTUM = ("momentum_buffer",)
_MUON: dict[str, Any] = {"on_nvme": "chunks", "whole_tensors": True, "rest": "AdamW"}
_LION: dict[str, Any] = {
    "skips_experts": True,
    "deepspeed_builders": ("cpu_lion", "fused_lion"),
    "deepspeed_defaults": {"lr": 1e-3, "betas": [0.9, 0.999]},
}
_ADAFACTOR: dict[str, Any] = {
    "moments": ("exp_avg",),
    "stepper": "adafactor_stepper.AdafactorStepper",
    "on_nvme": "chunks",
    "moments_with": "beta1",
    "needs_norms": True,
    "factors": True,
}
_FUSED = "zero_ext.optim.fused_optimizers"
_ONE_BIT: dict[str, Any] = {"module": "zero_ext.optim.one_bit", "moments": _TWO, "on_nvme": "never"}
_ONE_BIT_ADAM = _ONE_BIT | {"stepper": "one_bit_steppers.OneBitStepper", "resumes_from": _OF_TWO_MOMENTS}
_ONE_BIT_LAMB = _ONE_BIT | {"stepper": "one_bit_steppers.OneBitLambStepper"}

OPTIMIZERS: dict[str, OptimizerTraits] = {
    traits.name: traits
    for traits in (
        OptimizerTraits("Adadelta"),
        OptimizerTraits("Adafactor", **_ADAFACTOR),
        OptimizerTraits("Adagrad", deepspeed_builders=("cpu_adagrad",)),
        OptimizerTraits("Adam", deepspeed_builders=("cpu_adam", "fused_adam"), **_ADAM),
        OptimizerTraits("AdamW", **_ADAM),
        OptimizerTraits("Adamax"),
        OptimizerTraits("ASGD"),
        OptimizerTraits("Lamb", _FUSED, _TWO, "lamb_stepper.LambStepper", **_LAMB),
        OptimizerTraits("Lion", _FUSED, ("exp_avg",), "fused.LionStepper", **_LION),
        OptimizerTraits(
            "Muon",
            "zero_ext.optim.full_tensors.muon",
            _MOMENTUM,
            "full_tensors.muon_stepper.MuonAndAdamWStepper",
            **_MUON,
        ),
        OptimizerTraits("NAdam"),
        OptimizerTraits("OneBitAdam", one_bit_stages=(0, 1), **_ONE_BIT_ADAM),
        OptimizerTraits("OneBitLamb", one_bit_stages=(0,), resumes_from=frozenset({"Lamb"}), **_ONE_BIT_LAMB),
        OptimizerTraits("RAdam"),
        OptimizerTraits("RMSprop"),
        OptimizerTraits("Rprop"),
        OptimizerTraits("SGD"),
        OptimizerTraits("ZeroOneAdam", one_bit_stages=(0, 1), **_ONE_BIT_ADAM),
    )
}

# Classes of other packages that the table's optimizers step too, by module and name.
SAME_OPTIMIZER = {"transformers.optimization.Adafactor": "Adafactor"}

# By the name of the class, also of a base class: why it cannot run on shards.
NEEDS_FULL_TENSORS = {
    "LBFGS": "It needs a closure and the inner products of full parameters",
    "SparseAdam": "It needs sparse gradients, and gradients here are flat and dense",
}
# By name in a configuration: why it is refused, and what to do instead.
UNSUPPORTED_OPTIMIZERS = {
    **{name: f"{reason}. Use AdamW" for name, reason in NEEDS_FULL_TENSORS.items()},
    **dict.fromkeys(
        ("MuAdam", "MuAdamW", "MuSGD"),
        "Its learning rates depend on full shapes, through package mup. Pass the optimizer object instead",
    ),
}


def traits_of(name: str) -> OptimizerTraits | None:
    """Return the row of ``name``, in upper or lower case."""
    return next((each for each in OPTIMIZERS.values() if each.name.lower() == name.lower()), None)


def planned_optimizers() -> dict[str, OptimizerTraits]:
    """Return the optimizers that plans are made for, by name: those with a fused step, without 1-bit ones."""
    return {name: each for name, each in OPTIMIZERS.items() if each.moments and not each.one_bit_stages}
