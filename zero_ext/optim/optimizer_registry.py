"""The classes and steps of the optimizers that run on shards, and checks of a user's optimizer.

:mod:`zero_ext.config.optimizer_traits` has what holds for each without torch. :func:`register` adds to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import optim

from zero_ext.config.optimizer_traits import (
    NEEDS_FULL_TENSORS,
    OPTIMIZERS,
    SAME_OPTIMIZER,
    OptimizerTraits,
)
from zero_ext.config.tiers import is_stored
from zero_ext.offload import StateField, TierManager
from zero_ext.optim.elementwise import (
    ElementwiseStepper,
    elementwise_kinds,
    initial_state,
    on_other_tensors,
)
from zero_ext.optim.elementwise_stream import ElementwiseStream, MultiTierStepper
from zero_ext.optim.full_tensors.muon_groups import check_matrices, check_settings, serves
from zero_ext.optim.full_tensors.owner_stepper import OwnerStepper
from zero_ext.optim.moments import moment_fields
from zero_ext.optim.one_bit import OneBitOptimizer
from zero_ext.optim.one_bit_steppers import OneBitStepper
from zero_ext.optim.stepper import MomentsDtype, OwnedRange, Stepper, StepperInputs, TensorExchange, Total


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer class that runs on shards.

    Args:
        traits: its row in the table of optimizers.
        kind: the class.
        stepper: makes its fused stepper. None: its own code, which is element-wise, runs on the shards.
    """

    traits: OptimizerTraits
    kind: type[optim.Optimizer]
    stepper: Callable[[StepperInputs], Stepper] | None = None


ENTRIES: dict[str, OptimizerEntry] = {}


def register(
    traits: OptimizerTraits,
    kind: type[optim.Optimizer],
    stepper: Callable[[StepperInputs], Stepper] | None = None,
) -> None:
    """Add an optimizer, with the arguments of an :class:`OptimizerEntry`, so that configurations can name it.

    Raises:
        ValueError: `traits` does not describe `kind` and `stepper`, or another optimizer has its name.
    """
    name = traits.name
    for what, expected, found in (
        ("name of its class", name, kind.__name__),
        ("fused stepper", bool(traits.moments), stepper is not None),
        ("1-bit class", bool(traits.one_bit_stages), issubclass(kind, OneBitOptimizer)),
        ("row in the table", traits, OPTIMIZERS.get(name, traits)),
        ("class in the table", ENTRIES[name].kind if name in ENTRIES else kind, kind),
    ):
        if expected != found:
            raise ValueError(
                f"optimizer {name}: {what}: expected {expected} by its traits, got {found}. Make them agree."
            )
    OPTIMIZERS[name] = traits
    ENTRIES[name] = OptimizerEntry(traits, kind, stepper)


for _traits in tuple(OPTIMIZERS.values()):
    _stepper = resolve_name(f"zero_ext.optim.{_traits.stepper}") if _traits.stepper else None
    register(_traits, resolve_name(f"{_traits.module}.{_traits.name}"), _stepper)
ENTRIES["torch.optim.Muon"] = replace(ENTRIES["Muon"], kind=optim.Muon)
# A user's subclass of the base steps as 1-bit Adam does.
ENTRIES["OneBitOptimizer"] = OptimizerEntry(OPTIMIZERS["OneBitAdam"], OneBitOptimizer, OneBitStepper)

_INSTEAD = (
    "Use torch's AdamW, Adam, SGD, Adagrad or RMSprop, in a Hugging Face Trainer optim='adamw_torch', 'sgd', "
    "'adagrad' or 'rmsprop'. To save memory offload the optimizer, or keep AdamW's moments in 8 or 16 bits: "
    "precision.moments_dtype '8bit' or 'bf16', in DeepSpeed's JSON bf16.bf16_optimizer_states true."
)


_AT_OWNERS = "zero_ext_whole_tensors"  # set on an optimizer, so that copies of it have it


def declare_at_owners(optimizer: Any, declared: bool) -> Any:
    """Return the user's ``optimizer``, marked if it is declared to need full tensors and to step each by
    itself."""
    if isinstance(optimizer, optim.Optimizer):
        setattr(optimizer, _AT_OWNERS, declared)
    return optimizer


def steps_at_owners(optimizer: optim.Optimizer | None) -> bool:
    """Return whether the own code of ``optimizer`` runs on full tensors, each at its owner."""
    return bool(getattr(optimizer, _AT_OWNERS, False))


def entry_of(kind: type[optim.Optimizer]) -> OptimizerEntry | None:
    """Return the entry of a class, None if it is not in the table."""
    # By name, so that no package is imported for its class.
    same = SAME_OPTIMIZER.get(f"{kind.__module__}.{kind.__qualname__}")
    if same is not None:
        return replace(ENTRIES[same], kind=kind)
    return next((entry for entry in ENTRIES.values() if entry.kind is kind), None)


def fused_entry(optimizer: optim.Optimizer) -> OptimizerEntry | None:
    """Return the entry of ``optimizer`` if a fused op, or its own code at the owners of full tensors,
    computes what it would, else None."""
    if steps_at_owners(optimizer):
        kind = type(optimizer)
        traits = OptimizerTraits(kind.__qualname__, kind.__module__, on_nvme="never", whole_tensors=True)
        return OptimizerEntry(traits, kind, OwnerStepper)
    # A subclass may step otherwise, except of those that step in the engine alone.
    kinds = type(optimizer).__mro__ if is_one_bit(optimizer) else (type(optimizer),)
    entry = next((found for kind in kinds if (found := entry_of(kind)) is not None), None)
    if entry is None or entry.stepper is None:
        return None
    options = (group.get(option) for group in optimizer.param_groups for option in entry.traits.unless)
    return None if any(options) else entry


def fusible(optimizer: optim.Optimizer) -> bool:
    """Return whether a fused op computes what ``optimizer`` would."""
    return fused_entry(optimizer) is not None


def streamable(optimizer: optim.Optimizer) -> bool:
    """Return whether the fused op also steps state on NVMe, in one pipeline."""
    entry = fused_entry(optimizer)
    return entry is not None and entry.traits.on_nvme == "pipeline"


def is_one_bit(optimizer: optim.Optimizer | None) -> bool:
    """Return whether ``optimizer`` is one of the one-bit family."""
    return isinstance(optimizer, OneBitOptimizer)


def needs_norms(optimizer: optim.Optimizer | None) -> bool:
    """Return whether a step of ``optimizer`` needs norms of full parameters of all ranks."""
    entry = None if optimizer is None else fused_entry(optimizer)
    return entry is not None and entry.traits.needs_norms


def factors_state(optimizer: optim.Optimizer | None) -> bool:
    """Return whether ``optimizer`` keeps values for rows and columns of full matrices."""
    entry = None if optimizer is None else fused_entry(optimizer)
    return entry is not None and entry.traits.factors


def needs_whole_tensors(optimizer: optim.Optimizer | None) -> bool:
    """Return whether a step of ``optimizer`` needs full tensors, each at one rank."""
    entry = None if optimizer is None else fused_entry(optimizer)
    return entry is not None and entry.traits.whole_tensors


def steps_full_tensors(rule: str) -> bool:
    """Return whether the optimizer named ``rule`` of :func:`update_rule` needs full tensors, where one of
    the optimizers of a class does; one class alone has no rules."""
    return not rule or OPTIMIZERS[rule].whole_tensors


def resumes_from(own: str | None, saved: str | None) -> bool:
    """Return whether an optimizer of the class named ``own`` takes over state of the one named ``saved``: its
    own, or, for one that exchanges signs, that of one with the same two moments.
    """
    return own == saved or (own in OPTIMIZERS and saved in OPTIMIZERS[own].resumes_from)


def check_step_time(optimizer: optim.Optimizer, when: str) -> None:
    """Raise ``ValueError`` if ``optimizer`` cannot run its updates at the time ``when``, a value of
    ``offload.update_mode``."""
    if needs_norms(optimizer) and when != "after_backward":
        raise ValueError(
            f"offload.update_mode: expected 'after_backward' with {type(optimizer).__name__}, got '{when}'. "
            "Its step needs sums over all ranks, which are made once for all layers, when all gradients are "
            "ready and before any weight changes. Set offload.update_mode to 'after_backward'."
        )
    if steps_at_owners(optimizer) and when != "after_backward":
        raise ValueError(
            "offload.update_mode: expected 'after_backward' with whole_tensors=True, got "
            f"'{when}'. All tensors are stepped at their owners together, once for every change of the param "
            "groups' own entries. Set offload.update_mode to 'after_backward'."
        )


def check_skipped_experts(optimizer: optim.Optimizer, update_experts: str) -> None:
    """Raise ``ValueError`` if ``optimizer`` cannot leave out experts as ``update_experts``, a value of
    ``units.update_experts``, asks for."""
    if update_experts == "all":
        return
    entry = fused_entry(optimizer)
    if entry is not None and entry.traits.skips_experts:
        return
    active = [
        option
        for option in ("amsgrad", "differentiable")
        if any(group.get(option) for group in optimizer.param_groups)
    ]
    found = type(optimizer).__name__ + "".join(f" with {option}" for option in active)
    raise ValueError(
        "units.update_experts: expected Adam, AdamW or Lion, without amsgrad and differentiable, for "
        f"'routed', got {found}. Its step cannot leave out experts of a stacked parameter. Use AdamW, or set "
        "units.update_experts to 'all'."
    )


def check_groups(optimizer: optim.Optimizer) -> None:
    """Refuse with ``ValueError`` param groups that the optimizer's class refuses too, but that have changed
    since, and matrices that only its step would refuse."""
    if isinstance(optimizer, ENTRIES["Muon"].kind | ENTRIES["torch.optim.Muon"].kind):
        for group in optimizer.param_groups:
            check_settings(group)
            if serves(group):
                check_matrices(group["params"])


def check_elementwise(optimizer: optim.Optimizer, declared: bool) -> None:
    """Refuse with ``ValueError`` what cannot run on shards; tries out what the user declares
    element-wise."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        if base.__name__ in NEEDS_FULL_TENSORS:
            reason = NEEDS_FULL_TENSORS[base.__name__]
            raise ValueError(f"optimizer {name}: it cannot run on sharded state. {reason}. {_INSTEAD}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer {name}: expected differentiable=False on shards, got True. Leave it False."
        )
    if entry_of(kind) is not None:
        return
    if not declared:
        raise ValueError(
            f"optimizer {name}: it is not known to be element-wise, which running on shards needs. "
            f"{_INSTEAD} If each element's update depends on that element alone, pass elementwise=True to "
            "zero_ext.prepare, which then checks it once on a small vector. If it needs tensors in full and "
            "steps each by itself, pass whole_tensors=True to zero_ext.prepare."
        )
    _try_out(optimizer, name)


def _try_out(optimizer: optim.Optimizer, name: str) -> None:
    generator = torch.Generator().manual_seed(20)
    values = torch.randn(64, generator=generator, device="cpu")
    gradients = [torch.randn(64, generator=generator, device="cpu") for _ in range(3)]
    for group in optimizer.param_groups:
        full = _run(optimizer, group, [values.clone()], [[g.clone()] for g in gradients])
        cut = [values[:23].clone(), values[23:].clone()]
        split = _run(optimizer, group, cut, [[g[:23].clone(), g[23:].clone()] for g in gradients])
        if not torch.equal(full, split):
            raise ValueError(
                f"optimizer {name}: it was declared element-wise, but a vector stepped in two slices comes "
                "out different from the same vector stepped as one (by up to "
                f"{(full - split).abs().max():.3g}). It cannot run on shards. {_INSTEAD}"
            )


def _run(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> torch.Tensor:
    trial = on_other_tensors(optimizer, [{**group, "params": values}])
    for value in values:
        trial.state[value] = initial_state(optimizer, value, group)
    for step in gradients:
        for value, gradient in zip(values, step, strict=True):
            value.grad = gradient
        trial.step()
    return torch.cat(values)


def make_stepper(
    optimizer: optim.Optimizer,
    ranges: Sequence[OwnedRange],
    moments_dtype: MomentsDtype,
    elementwise: bool,
    tiers: TierManager,
    total: Total,
    exchange: TensorExchange | None = None,
) -> Stepper:
    """Return the stepper for a user's optimizer: its fused one, as far as the table has one for the tiers of
    the state; else the class's own code on the shards. `total` sums up what a step needs of all ranks.

    Raises `ValueError` if the class needs whole tensors, or is unknown and `elementwise` is False, or if
    moments in 8 bits are asked of any but those that have them.
    """
    entry = fused_entry(optimizer)
    if entry is None:
        check_elementwise(optimizer, elementwise)
    if moments_dtype == "8bit" and (entry is None or not entry.traits.eight_bit):
        raise ValueError(
            "precision.moments_dtype: expected Adam or AdamW without amsgrad for '8bit', got "
            f"{type(optimizer).__name__}, which stores state in floats only. Remove the key."
        )

    inputs = StepperInputs(optimizer, ranges, tiers.staging, moments_dtype, total, exchange)
    in_memory = ElementwiseStepper if entry is None or entry.stepper is None else entry.stepper
    own_code = entry is None or entry.traits.on_nvme == "own code"
    stored = [index for index, owned in enumerate(ranges) if own_code and is_stored(owned.state.tier)]
    if not stored:
        return in_memory(inputs)
    live = [index for index in range(len(ranges)) if index not in stored]

    def over(indices: list[int]) -> StepperInputs:
        return replace(inputs, ranges=[ranges[index] for index in indices])

    return MultiTierStepper([(in_memory(over(live)), live), (ElementwiseStream(over(stored)), stored)])


def update_rule(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the name of the table's optimizer that steps a param group, where one optimizer has several;
    else nothing. Parameters of two rules are never in one unit."""
    if steps_at_owners(optimizer) or "use_muon" not in group:
        return ""
    return "Muon" if serves(group) else "AdamW"


def state_kinds(
    optimizer: optim.Optimizer, moments_dtype: MomentsDtype, rule: str = ""
) -> dict[str, StateField]:
    """Return the state that `make_stepper`'s stepper keeps besides the master weights, in the order that a
    step on NVMe wants; of several rules that of ``rule``."""
    entry = ENTRIES[rule] if rule else fused_entry(optimizer)
    if entry is not None and (entry.traits.eight_bit or moments_dtype != "8bit"):
        option = entry.traits.moments_with
        present = not option or any(group.get(option) is not None for group in optimizer.param_groups)
        return moment_fields(moments_dtype, entry.traits.moments if present else ())
    kinds = {kind for group in optimizer.param_groups for kind in elementwise_kinds(optimizer, group)}
    return dict.fromkeys(sorted(kinds), StateField(torch.float32))
