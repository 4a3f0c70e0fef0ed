"""Which optimizers run on shards: by the table, by trial, or not, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from zero_ext.config.optimizer_traits import NEEDS_FULL_TENSORS, OPTIMIZERS, OptimizerTraits
from zero_ext.optim.elementwise import ElementwiseStepper
from zero_ext.optim.optimizer_registry import (
    ENTRIES,
    check_elementwise,
    fusible,
    is_one_bit,
    register,
    resumes_from,
)


class Lion(optim.Optimizer):
    """A third-party optimizer that is element-wise (Chen et al. 2023)."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                update = (0.9 * average + 0.1 * parameter.grad).sign()
                average.lerp_(parameter.grad, 0.01)
                parameter.sub_(update, alpha=group["lr"])


class Normed(Lion):
    """Divides by the norm of a whole tensor: not element-wise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class MyLBFGS(optim.LBFGS):
    """A subclass does not make it element-wise."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 4))]


@pytest.mark.parametrize(
    "kind", [each.kind for each in ENTRIES.values() if each.traits.on_nvme in ("pipeline", "own code")]
)
def test_listed_classes_pass_and_really_are_element_wise(kind: type[optim.Optimizer]) -> None:
    check_elementwise(kind(parameters()), declared=False)  # type: ignore[call-arg]

    class Unlisted(kind):  # type: ignore[misc,valid-type]
        pass

    check_elementwise(Unlisted(parameters()), declared=True)


@pytest.mark.parametrize("kind", [optim.LBFGS, MyLBFGS, optim.SparseAdam])
@pytest.mark.parametrize("declared", [False, True])
def test_classes_that_need_full_tensors_are_refused_with_the_reason(
    kind: type[optim.Optimizer], declared: bool
) -> None:
    model = nn.Linear(4, 4, bias=False)
    reason = NEEDS_FULL_TENSORS[kind.__name__.removeprefix("My")]
    with pytest.raises(ValueError, match=rf"{kind.__name__}: it cannot run on sharded state\. {reason}"):
        zero_ext.prepare(model, kind(model.parameters()), {"stage": 3}, elementwise=declared)  # type: ignore[call-arg]
    assert type(model.weight) is nn.Parameter and not hasattr(model.weight, "_zero_ext_engine_ref")


def test_an_unknown_class_needs_a_declaration_that_is_checked() -> None:
    with pytest.raises(ValueError, match=r"Lion: it is not known to be element-wise(?s:.*)elementwise=True"):
        check_elementwise(Lion(parameters()), declared=False)
    check_elementwise(Lion(parameters()), declared=True)
    with pytest.raises(
        ValueError, match=r"Normed: it was declared element-wise, but(?s:.*)comes out different"
    ):
        check_elementwise(Normed(parameters()), declared=True)


def test_the_trial_leaves_the_users_optimizer_as_it_was() -> None:
    optimizer = Lion(parameters(), lr=0.5)
    before = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    check_elementwise(optimizer, declared=True)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


def test_a_declared_class_trains_as_by_itself() -> None:
    torch.manual_seed(3)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    prepared, optimizer = zero_ext.prepare(
        model, Lion(model.parameters(), 0.1), {"stage": 3}, elementwise=True
    )
    plain = Lion(twin.parameters(), 0.1)
    for _ in range(3):
        inputs = torch.randn(5, 4)
        for net, stepper in ((prepared, optimizer), (twin, plain)):
            net(inputs).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    for name, value in zero_ext.full_state_dict(prepared).items():
        assert torch.equal(value, twin.state_dict()[name])


def test_differentiable_is_refused() -> None:
    with pytest.raises(ValueError, match="expected differentiable=False on shards, got True"):
        check_elementwise(optim.AdamW(parameters(), differentiable=True), declared=False)


def test_what_runs_fused() -> None:
    assert fusible(optim.AdamW(parameters())) and fusible(optim.Adam(parameters(), maximize=True))
    assert not fusible(optim.AdamW(parameters(), amsgrad=True))
    assert not fusible(optim.SGD(parameters()))
    assert not fusible(type("MyAdamW", (optim.AdamW,), {})(parameters()))


def test_both_halves_of_the_table_have_the_same_optimizers() -> None:
    assert ENTRIES.keys() - {"OneBitOptimizer", "torch.optim.Muon"} == OPTIMIZERS.keys()
    for name, traits in OPTIMIZERS.items():
        entry = ENTRIES[name]
        assert entry.traits is traits
        assert entry.kind.__module__.startswith(traits.module)
        optimizer = entry.kind(parameters())  # type: ignore[call-arg]
        assert is_one_bit(optimizer) == bool(traits.one_bit_stages)
        assert fusible(optimizer) == bool(traits.moments)


class Doubled(optim.SGD):
    """An optimizer that an extension adds."""


@pytest.mark.parametrize(
    ("traits", "kind", "stepper", "what"),
    [
        (OptimizerTraits("Halved"), Doubled, None, "name of its class: expected Halved .* got Doubled"),
        (OptimizerTraits("Doubled", moments=("average",)), Doubled, None, "fused stepper: expected True"),
        (OptimizerTraits("Doubled"), Doubled, ElementwiseStepper, "fused stepper: expected False"),
        (OptimizerTraits("Doubled", one_bit_stages=(0,)), Doubled, None, "1-bit class: expected True"),
        (OptimizerTraits("SGD", needs_norms=True), optim.SGD, None, "row in the table"),
        (OPTIMIZERS["SGD"], type("SGD", (optim.SGD,), {}), None, "class in the table"),
    ],
)
def test_halves_that_disagree_are_refused(
    traits: OptimizerTraits, kind: type[optim.Optimizer], stepper: Any, what: str
) -> None:
    before = dict(OPTIMIZERS), dict(ENTRIES)
    with pytest.raises(ValueError, match=f"optimizer {traits.name}: {what}"):
        register(traits, kind, stepper)
    assert before == (OPTIMIZERS, ENTRIES)


@pytest.mark.parametrize(
    ("own", "saved", "resumes"),
    [
        ("AdamW", "AdamW", True),
        ("AdamW", "Adam", False),
        ("AdamW", "OneBitAdam", False),
        ("OneBitAdam", "AdamW", True),
        ("ZeroOneAdam", "OneBitAdam", True),
        ("OneBitAdam", "OneBitLamb", False),
        ("OneBitLamb", "Lamb", True),
        ("OneBitLamb", "OneBitLamb", True),
        ("OneBitLamb", "Adam", False),
        ("Lamb", "OneBitLamb", False),
        (None, None, True),
        (None, "Adam", False),
        ("Adam", None, False),
    ],
)
def test_whose_state_an_optimizer_resumes_from(own: str | None, saved: str | None, resumes: bool) -> None:
    assert resumes_from(own, saved) == resumes
