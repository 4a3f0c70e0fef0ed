"""Mixtures of transformers that gather only the experts that tokens are routed to: as one process."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.integrations.transformers.mixtures import (
    EXPERTS,
    FAMILIES,
    batches,
    losses_alone,
    mean_losses,
    mixture_of,
    optimizer_of,
)
from tests.integrations.transformers.models import enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.lazy_loop import Course, LazyLoop, check_untouched, own_shards
from zero_ext.zero import engine_of

STEPS, DEFAULT, MANY = 3, "grouped_mm", 64
# Llama 4 reads the weights of all experts.
ROUTED = [family for family in FAMILIES if family != "llama4"]
# Family, implementation of the experts, checkpointing of blocks.
CASES = [
    *((family, DEFAULT, False) for family in ROUTED),
    *((family, name, False) for family in ("mixtral", "gpt_oss") for name in ("eager", "batched_mm")),
    ("mixtral", DEFAULT, True),
]


class Reached:
    """The experts that the first forward of each rank's sample reaches, by name of the module."""

    def __init__(self, model: nn.Module, words: torch.Tensor) -> None:
        self.experts: dict[str, set[int]] = defaultdict(set)
        handles = [
            module.register_forward_pre_hook(self._note(name))
            for name, module in model.named_modules()
            if name.endswith(".experts")
        ]
        with torch.no_grad():
            for sample in words:
                model(input_ids=sample[None])
        for handle in handles:
            handle.remove()

    def _note(self, name: str) -> Any:
        return lambda _, args: self.experts[name].update(args[1].flatten().tolist())

    def elements(self, model: Any) -> int:
        """Elements of one gather of them from the shards of ``model``, with padding where all are reached."""
        found = 0
        for unit in engine_of(model).units:
            if not unit.spec.experts:
                continue
            reached = len(self.experts[unit.name])
            alone = sum(spec.numel for spec in unit.layout.specs) // unit.spec.experts
            found += unit.layout.numel if reached == unit.spec.experts else reached * alone
        return found


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize(("family", "experts", "checkpoints"), CASES)
def test_routed_experts_train_as_one_process(
    world: World, family: str, experts: str, checkpoints: bool
) -> None:
    enter(world)
    model, words = mixture_of(family, world.seed), batches(world.seed, world.size, STEPS)
    model.set_experts_implementation(experts)
    reached = Reached(model, words[0])
    alone = copy.deepcopy(model)
    if checkpoints:
        model.gradient_checkpointing_enable()
    expected = losses_alone(alone, words)
    config = {"stage": 3, "units": {"experts": "routed"}}
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=world.group)
    units = [unit for unit in engine_of(model).units if unit.spec.experts]
    assert {unit.name for unit in units} == reached.experts.keys()
    losses = mean_losses(world, model, optimizer, words)
    for mean, one in zip(losses, expected, strict=True):
        assert abs(mean - one) <= 1e-5 * abs(one), f"{losses}, one process {expected}, seed {world.seed}"
    full = zero_ext.full_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-4, msg=f"{name}, {world.seed}")


@on_ranks(2)
@pytest.mark.parametrize("experts", [DEFAULT, "eager", "batched_mm"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointed"])
def test_gathered_bytes_are_those_of_the_routed_experts(
    world: World, experts: str, checkpoints: bool
) -> None:
    enter(world)
    model = mixture_of("mixtral", world.seed, num_local_experts=MANY)
    model.set_experts_implementation(experts)
    words = batches(world.seed, world.size, 1)[0]
    reached = Reached(model, words)
    assert all(len(each) < MANY for each in reached.experts.values())
    if checkpoints:
        model.gradient_checkpointing_enable()
    small = MANY * 16 + 1  # the router's weight; all others but those of experts are smaller
    config = {"stage": 3, "units": {"experts": "routed", "persistence_threshold": small}}
    model, _ = zero_ext.prepare(model, optimizer_of(model), config, process_group=world.group)
    traffic, own = engine_of(model).traffic, words[world.rank, None]
    once = reached.elements(model)
    for passes in (1, 2):
        traffic.begin_step()
        with torch.set_grad_enabled(passes == 2):
            loss = model(input_ids=own, labels=own).loss
        if passes == 2:
            loss.backward()
        assert traffic.elements["gather"] == passes * once, f"seed {world.seed}"
        sent = sum(world.everyone(traffic.bytes_sent["gather"]))
        assert sent == (world.size - 1) * 4 * passes * once, f"seed {world.seed}"


@on_ranks(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_steps_leave_out_experts_without_tokens(world: World, family: str) -> None:
    enter(world)
    model, words = mixture_of(family, world.seed), batches(world.seed, world.size, STEPS)
    shapes = {name: each.shape for name, each in model.named_parameters()}
    lazy = LazyLoop(copy.deepcopy(model), Course())
    config = {"stage": 3, "units": {"experts": "routed", "update_experts": "routed"}}
    model, optimizer = zero_ext.prepare(model, Course().make(model), config, process_group=world.group)
    untouched = 0
    for samples in words:
        reached = Reached(lazy.model, samples).experts
        for sample in samples[:, None]:
            (lazy.model(input_ids=sample, labels=sample).loss / world.size).backward()
        lazy.update(lambda module, reached=reached: frozenset(reached[module]))
        before, own = own_shards(optimizer), samples[world.rank, None]
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = own_shards(optimizer)
        for name, experts in reached.items():
            of_it = {key: value for key, value in after.items() if key[1].startswith(f"{name}.")}
            earlier = {key: before[key] for key in of_it}
            untouched += check_untouched(earlier, of_it, shapes, frozenset(experts))
    assert untouched > 0
    full = zero_ext.full_state_dict(model)
    for name, value in lazy.model.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-4, msg=f"{name}, {world.seed}")


class _WithSharedExpert(nn.Module):
    """Experts with a module inside, whose weight has as many rows as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, 4, 4))
        self.shared = nn.Linear(4, EXPERTS)

    def forward(self, tokens: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        routed = [token @ self.up[number] for token, number in zip(tokens, top_k_index.tolist(), strict=True)]
        return torch.stack(routed).sum(-1) + self.shared(tokens).sum(-1)


@on_ranks(2)
def test_only_the_weights_of_experts_are_gathered_by_expert(world: World) -> None:
    enter(world)
    generator = torch.Generator().manual_seed(world.seed)
    model = nn.ModuleDict({"experts": _WithSharedExpert()})
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    tokens = torch.randn(2, 4, generator=generator)
    index = torch.tensor([0, EXPERTS - 1])
    expected = model["experts"](tokens, index)
    config = {"stage": 3, "units": {"experts": "routed", "persistence_threshold": 0}}
    prepared, _ = zero_ext.prepare(model, None, config, process_group=world.group, wrap=False)
    assert torch.equal(prepared["experts"](tokens, index), expected), f"seed {world.seed}"


def test_experts_that_are_called_without_routes_are_refused() -> None:
    model = mixture_of("llama4", seed=1)
    with pytest.raises(ValueError, match=r"^units\.experts: expected for 'routed' mixtures with stacked"):
        zero_ext.prepare(model, None, {"stage": 3, "units": {"experts": "routed"}})
