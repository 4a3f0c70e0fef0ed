"""Which optimizers run on shards: by the table, by trial, or not, with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.optim.memory_range import alone, device_tiers, memory_range
from zero_ext.config import training, zero_config
from zero_ext.optim import Segment, make_stepper, optimizer_registry, state_kinds
from zero_ext.optim.elementwise import ElementwiseStepper
from zero_ext.optim.optimizer_registry import (
    OPTIMIZERS,
    OptimizerEntry,
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
    "kind", [entry.kind for entry in OPTIMIZERS.values() if entry.on_nvme in ("pipeline", "own code")]
)
def test_listed_classes_pass_and_really_are_element_wise(kind: type[optim.Optimizer]) -> None:
    check_elementwise(kind(parameters()), declared=False)  # type: ignore[call-arg]

    class Unlisted(kind):  # type: ignore[misc,valid-type]
        pass

    check_elementwise(Unlisted(parameters()), declared=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (optim.LBFGS, "line search"),
        (MyLBFGS, "line search"),
        (optim.Adafactor, "rows and columns"),
        (optim.Muon, "orthogonalises whole matrices"),
        (optim.SparseAdam, "sparse gradients"),
    ],
)
@pytest.mark.parametrize("declared", [False, True])
def test_classes_that_need_full_tensors_are_refused_with_the_reason(
    kind: type[optim.Optimizer], reason: str, declared: bool
) -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match=rf"{kind.__name__}: it cannot run on sharded state: .*{reason}"):
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


def test_the_table_has_the_names_that_configurations_may_have() -> None:
    abstract = {name for name, entry in OPTIMIZERS.items() if inspect.isabstract(entry.kind)}
    assert abstract == {"OneBitOptimizer"}
    assert OPTIMIZERS.keys() - abstract == set(training.OPTIMIZERS)
    found = [name for name in OPTIMIZERS.keys() - abstract if is_one_bit(OPTIMIZERS[name].kind(parameters()))]
    assert set(found) == set(zero_config.ONE_BIT)


class Doubled(optim.SGD):
    """An optimizer that an extension adds."""


class DoubledStepper(ElementwiseStepper):
    """Its stepper."""


def test_an_optimizer_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_registry, "OPTIMIZERS", dict(OPTIMIZERS))
    optimizer = Doubled(parameters(), lr=0.1)
    assert not fusible(optimizer) and not resumes_from("Doubled", "SGD")
    register(OptimizerEntry(Doubled, DoubledStepper, ("momentum_buffer",), resumes_from=frozenset({"SGD"})))
    ranges = [memory_range(torch.zeros(4), None, (Segment("a", 0, 0, 4, 0),))]
    stepper = make_stepper(optimizer, ranges, torch.float32, False, device_tiers(), alone)
    assert fusible(optimizer) and isinstance(stepper, DoubledStepper)
    assert list(state_kinds(optimizer, torch.bfloat16)) == ["momentum_buffer"]
    assert resumes_from("Doubled", "SGD") and resumes_from("Doubled", "Doubled")
    with pytest.raises(ValueError, match="got Doubled, which stores state in floats only"):
        make_stepper(optimizer, ranges, "8bit", False, device_tiers(), alone)


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
