"""Units with stacked experts: what is gathered of them, results as in one process, what is refused."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import check_near
from tests.zero.unshard.stacked_mixtures import (
    EXPERTS,
    LAYERS,
    OF_AN_EXPERT,
    ROUTED,
    MixtureModel,
    Routings,
    batch_of,
    gathered_elements,
    prepared_mixture,
    sent_bytes,
    twin_of,
)
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import make_collectives
from zero_ext.config import UnitConfig, ZeroConfig
from zero_ext.config.buffer_sizes import STORAGE_ALIGNMENT
from zero_ext.zero import engine_of
from zero_ext.zero.construction.model_checks import check_routed_experts
from zero_ext.zero.units.parameter_marks import mark_experts_of

# Experts that the tokens of each rank reach, of three ranks.
REACHES: dict[str, list[list[int]]] = {
    "one expert": [[5], [5], [5]],
    "another on each rank": [[0, 1], [7], [3, 4]],
    "neighbors": [[2, 3], [3, 4], [2]],
    "no expert on rank 1": [[6, 1], [EXPERTS], [1]],
    "no expert": [[EXPERTS], [EXPERTS], [EXPERTS]],
}


@on_ranks(2, 3)
@pytest.mark.parametrize("reach", REACHES)
def test_only_what_any_rank_reaches_is_gathered(world: World, reach: str) -> None:
    model, optimizer = prepared_mixture(world, MixtureModel(world.seed))
    batch = batch_of(world.seed, REACHES[reach][: world.size])
    once = LAYERS * len(batch.reached()) * OF_AN_EXPERT
    routings = Routings()
    gathered_elements(model)
    with routings.counted():
        with torch.no_grad():
            batch.loss_on(model, world.rank)
        assert sent_bytes(world, model) == (world.size - 1) * 4 * once
        assert gathered_elements(model) == once, f"forward, seed {world.seed}"
        batch.loss_on(model, world.rank).backward()
        assert sent_bytes(world, model) == (world.size - 1) * 4 * 2 * once
        assert gathered_elements(model) == 2 * once, f"forward and backward, seed {world.seed}"
    assert routings.count == 2 * LAYERS  # backward gathers what forward did
    optimizer.step()


@on_ranks(2)
def test_all_experts_are_one_ordinary_gather(world: World) -> None:
    model, _ = prepared_mixture(world, MixtureModel(world.seed))
    gathered_elements(model)
    batch_of(world.seed, [[0, 1, 2, 3], [4, 5, 6, 7]]).loss_on(model, world.rank).backward()
    units = [unit for unit in engine_of(model).units if unit.spec.experts]
    assert len(units) == LAYERS
    assert gathered_elements(model) == 2 * sum(unit.layout.numel for unit in units)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_is_that_of_one_process(world: World, checkpoints: bool, micro_batches: int) -> None:
    model = MixtureModel(world.seed, checkpoints)
    (twin, alone), reaches = twin_of(model), list(REACHES.values())
    model, optimizer = prepared_mixture(world, model, batch={"gradient_accumulation_steps": micro_batches})
    gathered_elements(model)
    for step in range(len(reaches)):
        wanted = 0
        for micro in range(micro_batches):
            batch = batch_of(world.seed + step, reaches[(step + micro) % len(reaches)][: world.size])
            loss, expected = batch.loss_on(model, world.rank), batch.mean_loss(twin)
            model.backward(loss / micro_batches)
            (expected / micro_batches).backward()
            mean = sum(world.everyone(loss.item())) / world.size
            assert abs(mean - expected.item()) <= 1e-5 * expected.item(), f"step {step}, seed {world.seed}"
            wanted += 2 * LAYERS * len(batch.reached()) * OF_AN_EXPERT
        if world.size > 1:
            assert gathered_elements(model) == wanted, f"step {step}, seed {world.seed}"
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    check_near(model, twin, 1e-4, 1e-5)


@on_ranks(2)
def test_forwards_with_other_routes_before_one_backward(world: World) -> None:
    model = MixtureModel(world.seed)
    twin, alone = twin_of(model)
    model, optimizer = prepared_mixture(world, model)
    batches = [batch_of(world.seed, REACHES[name][:2]) for name in ("neighbors", "another on each rank")]
    sum(batch.loss_on(model, world.rank) for batch in batches).backward()  # type: ignore[union-attr]
    sum(batch.mean_loss(twin) for batch in batches).backward()  # type: ignore[union-attr]
    for name, parameter in twin.named_parameters():
        found = zero_ext.full_gradient(dict(model.module.named_parameters())[name])
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    optimizer.step()
    alone.step()
    check_near(model, twin, 1e-4, 1e-5)


@on_ranks(2)
def test_other_experts_read_as_nan_inside_forward_and_in_full_outside(world: World) -> None:
    plain = MixtureModel(world.seed)
    values = plain.layers[0].experts.up_proj.detach().clone()  # type: ignore[union-attr]
    model, _ = prepared_mixture(world, plain)
    seen: list[torch.Tensor] = []
    experts = model.module.layers[0].experts
    experts.register_forward_pre_hook(lambda module, *_: seen.append(module.up_proj.detach().clone()))
    batch_of(world.seed, [[2], [6]]).loss_on(model, world.rank)
    inside = seen[0].isnan().flatten(1).all(1).tolist()
    assert inside == [number not in (2, 6) for number in range(EXPERTS)]
    assert torch.equal(seen[0][[2, 6]], values[[2, 6]])
    assert torch.equal(experts.up_proj.detach().clone(), values)
    with zero_ext.gathered(experts.up_proj):
        assert torch.equal(experts.up_proj, values)


@on_ranks(2)
def test_a_read_of_all_experts_during_a_call_gathers_the_rest(world: World) -> None:
    plain = MixtureModel(world.seed)
    values = plain.layers[0].experts.up_proj.detach().clone()  # type: ignore[union-attr]
    model, _ = prepared_mixture(world, plain)
    seen: list[torch.Tensor] = []

    def read(module: Any, *_: Any) -> None:
        with zero_ext.gathered(module.up_proj):
            seen.append(module.up_proj.detach().clone())

    model.module.layers[0].experts.register_forward_pre_hook(read)
    gathered_elements(model)
    batch_of(world.seed, [[2], [6]]).loss_on(model, world.rank)
    assert torch.equal(seen[0], values)
    assert gathered_elements(model) == (LAYERS * 2 + (EXPERTS - 2)) * OF_AN_EXPERT


@on_ranks(2)
def test_a_write_while_some_experts_are_gathered_is_refused_on_all_ranks(world: World) -> None:
    plain = MixtureModel(world.seed)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model, _ = prepared_mixture(world, plain)

    def double(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.up_proj.mul_(2)

    handle = model.module.layers[0].experts.register_forward_pre_hook(double)
    batch = batch_of(world.seed, [[2], [6]])
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"parameter 'layers.0.experts.up_proj': expected no write"):
            batch.loss_on(model, world.rank)
        handle.remove()
        batch.loss_on(model, world.rank)
    full = zero_ext.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in before.items())


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_shards_of_other_experts_are_not_read_from_their_tier(tier: str) -> None:
    """One process, in inference: NVMe is read in blocks."""
    model = MixtureModel(seed=3)
    twin, _ = twin_of(model)
    batch = batch_of(3, [[1, 6]])
    with tempfile.TemporaryDirectory() as folder:
        offload = {"params": tier, **({"nvme_paths": [folder]} if tier == "nvme" else {})}
        model, _ = zero_ext.prepare(model, None, {"stage": 3, "units": ROUTED, "offload": offload})
        engine = engine_of(model)
        engine.tiers.transfers.clear()
        with torch.no_grad():
            assert torch.equal(batch.loss_on(model, 0), batch.loss_on(twin, 0))
        moved = sum(engine.tiers.transfers.moved.values())
    exact = LAYERS * len(batch.reached()) * OF_AN_EXPERT * 4
    ranges = LAYERS * len(batch.reached()) * 3  # of each weight
    slack = ranges * 2 * STORAGE_ALIGNMENT if tier == "nvme" else 0
    assert exact <= moved <= exact + slack
    assert moved < LAYERS * EXPERTS * OF_AN_EXPERT * 4


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class _Sorted(nn.Module):
    """Experts that are called with their sorted inputs and the number of each one's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4, 4))

    def forward(self, inputs: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([each @ one for each, one in zip(inputs.split(sizes), self.weight, strict=True)])


def _compiled(inside: bool) -> nn.Module:
    model = MixtureModel(seed=1)
    if inside:
        model.layers[0].compile()
        return model
    compiled: Any = torch.compile(model)
    return compiled


REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no mixture": (lambda: nn.Sequential(nn.Linear(4, 4)), {}, "got none"),
    "a list": (_Listed, {}, "got '' with experts in a list, which each rank calls as its own tokens need"),
    "another interface": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2), _Sorted()),
        {},
        "got '1' (_Sorted) with {'weight': (3, 4, 4)} and a forward (self, inputs: ",
    ),
    "a leaf": (
        lambda: MixtureModel(seed=1),
        {"leaf_modules": ["StackedMixture"]},
        "expected for 'routed' no mixture in units.leaf_modules, got 'layers.0'",
    ),
    "a compiled layer": (lambda: _compiled(True), {}, "got 'layers.0.experts' inside one"),
    "a compiled model": (lambda: _compiled(False), {}, "got 'layers.0.experts' inside one"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_routed_is_refused(case: str) -> None:
    make, units, expected = REFUSALS[case]
    with pytest.raises(ValueError, match=r"^units\.experts: expected for 'routed' ") as refusal:
        zero_ext.prepare(make(), None, {"stage": 3, "units": {"experts": "routed", **units}})
    assert expected in str(refusal.value)


def _refusal(model: nn.Module, model_ranks: Collectives | None = None) -> str:
    with pytest.raises(ValueError, match=r"^units\.experts: expected for 'routed' ") as refusal:
        check_routed_experts(model, ZeroConfig(units=UnitConfig(experts="routed")), False, model_ranks)
    return str(refusal.value)


def test_experts_on_other_ranks_are_refused() -> None:
    model = MixtureModel(seed=1)
    experts = model.get_submodule("layers.1.experts")
    mark_experts_of(experts, (0, 1))
    assert "got 'layers.1.experts' with experts split or spread over ranks" in _refusal(model)


@on_ranks(2)
def test_model_parallel_ranks_refuse_alike(world: World) -> None:
    ranks = make_collectives(world.group, 20.0)
    models = MixtureModel(world.seed), _Listed(), nn.Linear(2, 2)
    others = _refusal(models[world.rank], ranks)
    assert ("others on another model-parallel rank", "'' with experts in a list")[world.rank] in others
    assert "got none" in _refusal(models[2], ranks)
    settings = ZeroConfig(units=UnitConfig(experts="routed"))
    check_routed_experts(models[2 * world.rank], settings, False, ranks)  # one of them has a mixture


def test_a_call_without_routes_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        offload = {"params": "nvme", "nvme_paths": [folder]}
        model, _ = zero_ext.prepare(
            MixtureModel(seed=1), None, {"stage": 3, "units": ROUTED, "offload": offload}
        )
        words = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"experts 'layers.0.experts': expected the experts of each"):
            model.module.layers[0].experts(torch.zeros(3, 16), words.float(), words)
