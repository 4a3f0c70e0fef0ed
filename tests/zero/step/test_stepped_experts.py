"""Steps that leave out experts without tokens: as a loop of torch, bit for bit where nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.accelerator.stand_in import BACKEND
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.lazy_loop import (
    STEPS,
    Course,
    LazyLoop,
    batches_of,
    check_untouched,
    own_shards,
    reached_in,
    same_bits,
    unreached_elements,
)
from tests.zero.training import placed
from tests.zero.unshard.stacked_mixtures import EXPERTS, ROUTED, MixtureModel, batch_of
from zero_ext.offload import NvmeState
from zero_ext.zero import engine_of

UNITS = {**ROUTED, "update_experts": "routed"}
EVERYWHERE = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
RUNS: dict[str, tuple[Course, dict[str, Any], dict[str, Any]]] = {
    "device": (Course(), {}, {}),
    "Adam": (Course("Adam"), {}, {}),
    "Lion": (Course("Lion"), {}, {}),
    "host": (Course(), {"params": "host", "grads": "host", "optimizer": "host"}, {}),
    "host, params on nvme": (Course(), {"optimizer": "host", "params": "nvme"}, {}),
    "nvme": (Course(), EVERYWHERE, {}),
    "optimizer on nvme": (Course(), {"optimizer": "nvme"}, {}),
    "Lion on nvme": (Course("Lion"), EVERYWHERE, {}),
    "in backward": (Course(), {"optimizer": "host", "update_mode": "in_backward"}, {}),
    "on trial": (Course(clip=0.05), {**EVERYWHERE, "update_mode": "in_backward"}, {}),
    "Lion on trial": (Course("Lion", clip=0.05), {**EVERYWHERE, "update_mode": "in_backward"}, {}),
    "delayed": (Course(), {"optimizer": "host", "update_mode": "delayed"}, {}),
    "delayed, nvme": (Course(), {"optimizer": "nvme", "params": "nvme", "update_mode": "delayed"}, {}),
    "clipped": (Course(clip=0.05), {}, {}),
    "checkpointed": (Course(), {}, {"checkpoints": True}),
    "always gathered": (Course(), {}, {"persistence_threshold": 1 << 20}),
    "biases always gathered": (Course(), {}, {"persistence_threshold": 1 + EXPERTS * 32}),
}


def prepared(
    world: World, model: nn.Module, course: Course, offload: dict[str, Any], threshold: int = -1, **more: Any
) -> tuple[Any, Any]:
    units = UNITS if threshold < 0 else {**UNITS, "persistence_threshold": threshold}
    config = {
        "stage": 3,
        "units": units,
        "offload": offload,
        "gradient_clipping": course.clip,
        "batch": {"gradient_accumulation_steps": len(STEPS[0])},
        "timeout_seconds": 60.0,
        **more,
    }
    return zero_ext.prepare(model, course.make(model), config, process_group=world.group)


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in model.named_parameters()}


def train_step(world: World, model: Any, optimizer: Any, step: int) -> frozenset[int]:
    """A step; the experts that it has reached."""
    batches = batches_of(world, step)
    for batch in [each.to(str(engine_of(model).device)) for each in batches]:
        model.backward(batch.loss_on(model, world.rank) / len(batches))
    optimizer.step()
    optimizer.zero_grad()
    return reached_in(batches)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("case", RUNS)
def test_steps_are_those_of_a_loop_that_restores_other_experts(world: World, case: str) -> None:
    compare_with_the_loop(world, case, "cpu")


@on_ranks(1, 2, stand_in=True, by_turns=True)
@pytest.mark.parametrize("case", ["device", "host", "nvme", "Lion on nvme", "on trial", "delayed, nvme"])
def test_steps_on_an_accelerator_are_those_of_the_loop(world: World, case: str) -> None:
    offered = mock.patch.object(dist, "get_backend_config", lambda group: f"stand_in:{BACKEND}")
    with offered:
        compare_with_the_loop(world, case, "stand_in:0")


def compare_with_the_loop(world: World, case: str, device: str) -> None:
    course, offload, more = RUNS[case]
    plain = MixtureModel(world.seed, more.get("checkpoints", False))
    shapes = shapes_of(plain)
    lazy = LazyLoop(copy.deepcopy(plain), course)
    with placed(offload) as section:
        threshold = more.get("persistence_threshold", -1)
        model, optimizer = prepared(world, plain.to(device), course, section, threshold)
        before, checked = own_shards(optimizer), 0
        for step in range(2 * len(STEPS)):
            reached = train_step(world, model, optimizer, step)
            lazy.step(world, batches_of(world, step))
            if "update_mode" in offload:
                model.finish_update()
            after, where = own_shards(optimizer), f"step {step}, seed {world.seed}"
            checked += check_untouched(before, after, shapes, reached)
            before = after
            expected = lazy.values()
            for (kind, name, start), value in after.items():
                right = expected.get((kind, name), torch.zeros(shapes[name])).flatten()
                right = right[start : start + value.numel()]
                torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}, {where}")
            full = zero_ext.full_state_dict(model, rank0_only=False)
            for name, value in lazy.model.state_dict().items():
                torch.testing.assert_close(
                    full[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=f"{name}, {where}"
                )
        assert checked > 0
        steps = optimizer.state_dict()["scalars"].get("step", {})
        alone = {
            name: int(lazy.optimizer.state[each]["step"])
            for name, each in lazy.model.named_parameters()
            if "step" in lazy.optimizer.state[each]
        }
        assert steps == alone


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_reached_experts_step_as_in_a_dense_step(world: World, dtype: str, moments: str, tier: str) -> None:
    """All experts are reached first, so that moments of the others would change in the second step."""
    found = []
    for update_experts in ("all", "routed"):
        torch.manual_seed(world.seed)
        plain = MixtureModel(world.seed)
        shapes = shapes_of(plain)
        more: dict[str, Any] = {"precision": {"dtype": dtype, "moments_dtype": moments}}
        if dtype == "fp16":
            more["loss_scale"] = {"static": 64.0}
        more["units"] = {**UNITS, "update_experts": update_experts}
        more["batch"] = {}
        with placed(dict.fromkeys(EVERYWHERE, tier)) as section:
            model, optimizer = prepared(world, plain, Course(), section, **more)
            for reach in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1], [6]]):
                before = own_shards(optimizer)
                parameters = zero_ext.full_state_dict(model, rank0_only=False)
                model.backward(batch_of(world.seed, reach).loss_on(model, world.rank))
                optimizer.step()
                optimizer.zero_grad()
            after = own_shards(optimizer)
            now = zero_ext.full_state_dict(model, rank0_only=False)
            found.append((before, after, now))
            if update_experts == "routed":
                assert check_untouched(before, after, shapes, frozenset({1, 6})) > 0
                for name, value in now.items():
                    others = unreached_elements(value, name, frozenset({1, 6}))
                    assert same_bits(value[others], parameters[name][others])
    (before, dense, dense_values), (_, lazy, values) = found
    changed = 0
    for (kind, name, start), value in lazy.items():
        others = unreached_elements(torch.empty(shapes[name]), name, frozenset({1, 6})).flatten()
        others = others[start : start + value.numel()]
        key = kind, name, start
        assert same_bits(value[~others], dense[key][~others]), f"{kind} of {name}, seed {world.seed}"
        changed += int((dense[key][others] != before[key][others]).sum())
    assert changed > 0  # a dense step changes the others
    for name, value in values.items():
        others = unreached_elements(value, name, frozenset({1, 6}))
        assert same_bits(value[~others], dense_values[name][~others])


Reach = list[list[int]]


def backward(world: World, model: Any, reach: Reach) -> None:
    model.backward(batch_of(world.seed, reach[: world.size]).loss_on(model, world.rank))


def forward_before_zero_grad(world: World, model: Any, optimizer: Any) -> set[int]:
    loss = batch_of(world.seed, [[1], [2]][: world.size]).loss_on(model, world.rank)
    optimizer.zero_grad()
    model.backward(loss)
    return {1, 2}


def cleared_gradients(world: World, model: Any, optimizer: Any) -> set[int]:
    backward(world, model, [[1], [2]])
    optimizer.zero_grad()
    backward(world, model, [[3], [4]])
    return {3, 4}


def gradients_set_to_none(world: World, model: Any, optimizer: Any) -> set[int]:
    """As older loops clear gradients."""
    backward(world, model, [[1], [2]])
    for parameter in model.parameters():
        parameter.grad = None
    backward(world, model, [[3], [4]])
    return {3, 4}


def gradients_set_to_zero(world: World, model: Any, optimizer: Any) -> set[int]:
    backward(world, model, [[1], [2]])
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.5)
    zero_ext.full_gradient(next(model.parameters()))  # takes over what was assigned
    optimizer.zero_grad(set_to_none=False)
    backward(world, model, [[3], [4]])
    return {3, 4}


def overflow(world: World, model: Any, optimizer: Any) -> set[int]:
    loss = batch_of(world.seed, [[1], [2]][: world.size]).loss_on(model, world.rank)
    model.backward(loss * 1e30)
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    backward(world, model, [[3], [4]])
    return {3, 4}


def evaluation(world: World, model: Any, optimizer: Any) -> set[int]:
    with torch.no_grad():
        batch_of(world.seed, [[1], [2]][: world.size]).loss_on(model, world.rank)
    backward(world, model, [[3], [4]])
    with torch.no_grad():
        batch_of(world.seed, [[5], [6]][: world.size]).loss_on(model, world.rank)
    return {3, 4}


def forward_alone(world: World, model: Any, optimizer: Any) -> set[int]:
    batch_of(world.seed, [[1], [2]][: world.size]).loss_on(model, world.rank)
    backward(world, model, [[3], [4]])
    return {3, 4}


def gradients_of_two_steps(world: World, model: Any, optimizer: Any) -> set[int]:
    """Without ``zero_grad`` in between, the gradients of the first step are in those of the second."""
    backward(world, model, [[1], [2]])
    optimizer.step()
    backward(world, model, [[3], [4]])
    return {1, 2, 3, 4}


def assigned(world: World, model: Any, optimizer: Any) -> set[int]:
    backward(world, model, [[3], [4]])
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.5)
    return set(range(EXPERTS))


def all_in_one_micro_batch(world: World, model: Any, optimizer: Any) -> set[int]:
    """All experts are gathered as any unit is."""
    backward(world, model, [list(range(EXPERTS))] * 2)
    return set(range(EXPERTS))


LIVES: list[Callable[[World, Any, Any], set[int]]] = [
    forward_before_zero_grad,
    cleared_gradients,
    gradients_set_to_none,
    gradients_set_to_zero,
    overflow,
    evaluation,
    forward_alone,
    gradients_of_two_steps,
    assigned,
    all_in_one_micro_batch,
]


@on_ranks(1, 2)
@pytest.mark.parametrize("life", [each.__name__ for each in LIVES])
def test_experts_are_stepped_as_long_as_their_gradients_live(world: World, life: str) -> None:
    run = next(each for each in LIVES if each.__name__ == life)
    plain = MixtureModel(world.seed)
    shapes = shapes_of(plain)
    more: dict[str, Any] = {}
    if run is overflow:
        more = {"precision": {"dtype": "fp16"}, "loss_scale": {"static": 64.0}}
    model, optimizer = prepared(world, plain, Course(), {}, batch={}, **more)
    at_first = own_shards(optimizer)
    reached = run(world, model, optimizer)
    if world.size == 1 and run not in (assigned, all_in_one_micro_batch):
        reached = {number for number in reached if number % 2}  # the routes of the first rank
    optimizer.step()
    after = own_shards(optimizer)
    check_untouched(at_first, after, shapes, frozenset(reached))
    for (kind, name, start), value in after.items():
        if kind == "master" and ".experts." in name:
            others = unreached_elements(torch.empty(shapes[name]), name, frozenset(reached)).flatten()
            stepped = ~others[start : start + value.numel()]
            changed = (value != at_first[kind, name, start])[stepped].float()
            # An element may happen to step by nothing.
            assert not changed.numel() or changed.mean() > 0.99, f"{name}, seed {world.seed}"


@on_ranks(1, 2)
def test_a_checkpoint_resumes_in_another_tier(world: World) -> None:
    model, optimizer = prepared(world, MixtureModel(world.seed), Course(), {})
    lazy = LazyLoop(MixtureModel(world.seed), Course())
    folder = world.shared_folder()
    for step in range(2 * len(STEPS)):
        if step == len(STEPS) - 1:
            zero_ext.save_checkpoint(folder, model, step=step)
            with placed(EVERYWHERE) as section:
                model, optimizer = prepared(world, MixtureModel(world.seed + 1), Course(), section)
            zero_ext.load_checkpoint(folder, model)
        train_step(world, model, optimizer, step)
        lazy.step(world, batches_of(world, step))
    expected = lazy.values()
    for (kind, name, start), value in own_shards(optimizer).items():
        right = expected[kind, name].flatten()[start : start + value.numel()]
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}, {world.seed}")


class _WideExperts(nn.Module):
    """Experts of several chunks of state on NVMe each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 64, 800) / 8)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        return torch.stack([hidden @ self.weight[number] for number in top_k_index.tolist()])


class _OpaqueExperts(_WideExperts):
    """A forward with an output in which no tensor is found."""

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> Any:
        return SimpleNamespace(mixed=super().forward(hidden, top_k_index))


def test_experts_with_outputs_that_cannot_be_followed_are_stepped() -> None:
    torch.manual_seed(6)
    plain = nn.ModuleDict({"experts": _OpaqueExperts()})
    model, optimizer = zero_ext.prepare(
        plain, Course().make(plain), {"stage": 3, "units": {**UNITS, "persistence_threshold": 0}}, wrap=False
    )
    before = model["experts"].weight.detach().clone()
    model["experts"](torch.ones(64), torch.tensor([2, 5])).mixed.sum().backward()
    optimizer.step()
    changed = (model["experts"].weight.detach() != before).flatten(1).float().mean(1)
    assert [bool(share > 0.99) for share in changed] == [number in (2, 5) for number in range(EXPERTS)]
    assert changed[[0, 1, 3, 4, 6, 7]].sum() == 0


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
@pytest.mark.parametrize("update_experts", ["all", "routed"])
def test_nvme_moves_the_chunks_of_reached_experts(
    tmp_path: Path, optimizer: str, update_experts: str
) -> None:
    """State alone is on NVMe. It moves in chunks of the ring, of all fields of their elements."""
    torch.manual_seed(5)
    plain = nn.ModuleDict({"experts": _WideExperts()})
    offload = {"optimizer": "nvme", "nvme_paths": [str(tmp_path)], "staging_buffer_bytes": 1 << 20}
    config = {
        "stage": 3,
        "offload": offload,
        "units": {"experts": "routed", "update_experts": update_experts},
    }
    model, stepped = zero_ext.prepare(plain, Course(optimizer).make(plain), config, wrap=False)
    (master,) = engine_of(model).masters
    assert isinstance(master.state, NvmeState)
    size, reached = 64 * 800, (2, 5)
    spans = list(master.state.spans())
    touched = [
        (begin, end)
        for begin, end in spans
        if update_experts == "all" or any(begin < (n + 1) * size and n * size < end for n in reached)
    ]
    model["experts"](torch.ones(64), torch.tensor(reached)).sum().backward()
    stepped.step()
    moved = engine_of(model).tiers.transfers.last_moved
    expected = sum(master.state.stream.extent_bytes(end - begin) for begin, end in touched)
    assert moved["nvme", "host"] == moved["host", "nvme"] == expected
    if update_experts == "routed":
        fields = 1 + len(master.state.stream.kinds) - ("master" in master.state.stream.kinds)
        least = len(reached) * size * 4 * fields
        assert least <= expected <= least + 2 * len(reached) * master.state.stream.chunk_bytes
        assert len(touched) < len(spans) // 2


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "got SGD"),
    "RMSprop": (lambda model: torch.optim.RMSprop(model.parameters()), "got RMSprop"),
    "Lamb": (lambda model: zero_ext.Lamb(model.parameters()), "got Lamb"),
    "Adafactor": (lambda model: torch.optim.Adafactor(model.parameters()), "got Adafactor"),
    "Muon": (
        lambda model: zero_ext.Muon([{"params": list(model.parameters()), "use_muon": False}]),
        "got Muon",
    ),
    "one bit": (lambda model: zero_ext.OneBitAdam(model.parameters()), "got OneBitAdam"),
    "amsgrad": (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "AdamW with amsgrad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_without_lazy_steps_are_refused(case: str) -> None:
    make, words = REFUSED[case]
    model = MixtureModel(seed=1)
    with pytest.raises(ValueError, match=r"^units\.update_experts: expected Adam, AdamW or Lion") as refusal:
        zero_ext.prepare(model, make(model), {"stage": 3, "units": UNITS})
    assert words in str(refusal.value)
