"""Optimizers that need full tensors, run at owners: the same as in one process, wherever the state is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.checkpoint.mutations import edit_manifest
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.full_tensors import full_tensor_optimizers as users
from tests.zero.training import configuration, placed
from zero_ext.checkpoint import inspect_checkpoint
from zero_ext.zero import engine_of

STEPS = 5
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, {"optimizer": "host"}),
    (2, {}),
    (2, {"grads": "host", "optimizer": "host"}),
    (3, {}),
    (3, HOST),
    (3, {"params": "nvme", "grads": "nvme", "optimizer": "host"}),
]
UNITS = {"units": {"persistence_threshold": 100, "bucket_elements": 600}}


class Tensors(nn.Module):
    """Of zero to four dimensions, one stored by columns, and one that no loss uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kernel = torch.randn(2, 3, 1, 4).to(memory_format=torch.channels_last)
        self.kernel = nn.Parameter(kernel)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise((24, 13, 9)))
        self.columns = nn.Parameter(torch.randn(9, 5).T.mul(0.2))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.idle = nn.Linear(3, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Losses of inputs [n, 1, 3, 4]."""
        hidden = (inputs.view(-1, 1, 3, 1, 4) * self.kernel).tanh().flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return ((hidden @ self.columns.T) * self.scale - inputs.sum((1, 2, 3))[:, None]).square().mean()


def loss_of(model: Any, world: World, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(world.seed + 100 * step + rank)
    inputs = torch.randn(6, 1, 3, 4, generator=generator)
    loss: torch.Tensor = model(inputs.to(next(model.parameters()).device))
    return loss


def grouped(model: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() <= 1]
    return kind([{"params": matrices}, {"params": rest, "lr": 0.005}])


def plain(world: World, kind: Callable[..., torch.optim.Optimizer], steps: int = STEPS) -> tuple[Any, Any]:
    """Losses by step and rank, and the model after it, in one process: gradients are added up in the order of
    ranks, as the engine does."""
    model = Tensors(world.seed)
    optimizer, losses = grouped(model, kind), []
    used = [each for each in model.parameters() if each is not model.idle.weight]
    for step in range(steps):
        losses.append([])
        sums: list[torch.Tensor] = []
        for rank in range(world.size):
            loss = loss_of(model, world, step, rank)
            found = torch.autograd.grad(loss, used)
            sums = [one.add_(two) for one, two in zip(sums, found, strict=True)] if sums else list(found)
            losses[-1].append(loss.item())
        for parameter, total in zip(used, sums, strict=True):
            # In the parameter's memory format, as backward accumulates it.
            parameter.grad = torch.empty_like(parameter).copy_(total * (1.0 / world.size))
        optimizer.step()
    return losses, model


def prepared(
    world: World, kind: Any, stage: int, section: dict[str, Any], device: str = "cpu", **settings: Any
) -> tuple[Any, Any]:
    model = Tensors(world.seed).to(device)
    config = configuration(stage, offload=section, **UNITS, **settings)
    return zero_ext.prepare(
        model, grouped(model, kind), config, process_group=world.group, whole_tensors=True
    )


def train(world: World, model: Any, optimizer: Any, first: int = 0, last: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model, world, step, world.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_values(model: Any, expected: dict[str, torch.Tensor], label: object) -> None:
    found = zero_ext.full_state_dict(model, rank0_only=False)
    for name, value in expected.items():
        assert torch.equal(found[name], value), (label, name)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("name", ["Shampoo", "Rotated", "CountsInTensors"])
def test_equals_one_process(world: World, name: str) -> None:
    kind = getattr(users, name)
    losses, twin = plain(world, kind)
    for stage, offload in LAYOUTS:
        with placed(offload) as section:
            model, optimizer = prepared(world, kind, stage, section)
            assert train(world, model, optimizer) == [each[world.rank] for each in losses], (stage, offload)
            check_values(model, twin.state_dict(), (stage, offload))


@on_ranks(1, 2, stand_in=True)
def test_steps_run_on_the_device_of_the_state(world: World) -> None:
    _, twin = plain(world, users.Shampoo)
    for stage, offload, device in ((2, {}, "stand_in"), (3, HOST, "cpu")):
        with placed(offload) as section:
            model, optimizer = prepared(world, users.Shampoo, stage, section, "stand_in")
            train(world, model, optimizer)
            folder = world.shared_folder()
            zero_ext.save_checkpoint(folder, model)
            check_values(model, twin.state_dict(), stage)
            found = optimizer.state_dict()["unsharded"]
            assert {value.device.type for key, value in found.items() if "steps" not in key} == {device}
            model, optimizer = prepared(world, users.Shampoo, stage, section, "stand_in")
            zero_ext.load_checkpoint(folder, model)
            loaded = optimizer.state_dict()["unsharded"]
            assert all(torch.equal(loaded[key], value) for key, value in found.items())


@on_ranks(2, 3)
def test_state_is_only_at_owners_and_each_tensor_travels_three_times(world: World) -> None:
    model, optimizer = prepared(world, users.Shampoo, 2, {})
    train(world, model, optimizer)
    engine = engine_of(model)
    used = {name: value for name, value in Tensors(0).named_parameters() if "idle" not in name}
    own = {key.split("/")[1] for key in optimizer.state_dict()["unsharded"]}
    counts = torch.tensor([name in own for name in used], dtype=torch.int64)
    assert engine.collectives.sum_(counts, "owners").tolist() == [1] * len(used)
    sent = torch.tensor([engine.collectives.traffic.last_bytes_sent["matrices"]])
    elements = sum(map(torch.numel, used.values()))
    total = engine.collectives.sum_(sent, "bytes").item()
    assert 0.5 < total / (3 * 4 * elements * (world.size - 1) / world.size) < 1.5
    factors = sum(2 * 4 * sum(size**2 for size in value.shape) + 4 * value.numel() for value in used.values())
    held = torch.tensor([engine.memory_by_tier()["device"]["optimizer"]])
    masters = 0  # they are the parameters
    assert engine.collectives.sum_(held, "bytes").item() == pytest.approx(factors + masters, rel=0.1)


RESUMED = [
    ((3, {}), (1, HOST | {"params": "device", "grads": "device"})),
    ((0, {}), (2, {})),
    ((2, {}), (0, {})),
]


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("name", ["Shampoo", "Rotated", "StateOfSmall"])
def test_resumed_in_another_stage_and_tier(world: World, name: str) -> None:
    kind = getattr(users, name)
    _, twin = plain(world, kind, 6)
    for (stage, offload), (other, other_offload) in RESUMED:
        folder = world.shared_folder()
        model, optimizer = prepared(world, kind, stage, offload)
        train(world, model, optimizer, 0, 3)
        zero_ext.save_checkpoint(folder, model, async_save=stage == 0).wait()
        train(world, model, optimizer, 3, 4)
        own = optimizer.state_dict()
        model, optimizer = prepared(world, kind, other, other_offload)
        zero_ext.load_checkpoint(folder, model)
        train(world, model, optimizer, 3, 6)
        check_values(model, twin.state_dict(), (stage, other))
        model, optimizer = prepared(world, kind, stage, offload)
        optimizer.load_state_dict(own)
        found = optimizer.state_dict()["unsharded"]
        assert found.keys() == own["unsharded"].keys()
        assert all(torch.equal(found[key], value) for key, value in own["unsharded"].items())


@on_ranks(2)
def test_unused_parameters_and_skipped_steps_keep_their_state(world: World) -> None:
    """An fp16 step that overflows changes neither state, param groups nor parameters."""
    half = {"precision": {"dtype": "fp16"}, "loss_scale": {"initial_power": 8}}
    model, optimizer = prepared(world, users.Rotated, 2, {}, **half)
    for step in range(4):
        before, values = optimizer.state_dict(), zero_ext.full_state_dict(model, rank0_only=False)
        loss = loss_of(model, world, step, world.rank)
        model.backward(loss * 1e30 if step == 2 and world.rank == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (step == 2)
        assert optimizer.param_groups[0]["step"] == step + 1 - (step >= 2)
        after = optimizer.state_dict()
        assert not any("idle" in key for key in after["unsharded"])
        if step == 2:
            assert all(
                torch.equal(after["unsharded"][key], value) for key, value in before["unsharded"].items()
            )
            check_values(model, values, step)


@on_ranks(2, 3)
def test_an_error_at_one_owner_is_raised_on_all(world: World) -> None:
    model, optimizer = prepared(world, users.FailsLater, 3, {})
    loss_of(model, world, 0, world.rank).backward()
    with pytest.raises(RuntimeError, match="the optimizer's own code failed on ranks") as caught:
        optimizer.step()
    assert "Load the last checkpoint" in str(caught.value)
    notes = torch.tensor(
        ["'layers.0.weight': ArithmeticError: no root" in str(caught.value)], dtype=torch.int64
    )
    assert engine_of(model).collectives.sum_(notes, "owners").item() == 1
    with pytest.raises(RuntimeError, match="its state is damaged"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RandomLater", "random numbers: expected a step without any"),
        ("LaterState", "state entry 'momentum' appears or changes"),
    ],
)
def test_what_a_trial_cannot_see_is_refused_in_its_step(world: World, name: str, message: str) -> None:
    for stage in (0, 3):
        model, optimizer = prepared(world, getattr(users, name), stage, {})
        train(world, model, optimizer, 0, 4)
        with pytest.raises(RuntimeError, match="the optimizer's own code failed on ranks") as caught:
            train(world, model, optimizer, 4, 5)
        failed = torch.tensor([message in str(caught.value) and "parameter '" in str(caught.value)]).long()
        assert engine_of(model).collectives.sum_(failed, "failed").item() > 0


def test_a_rate_of_zero_at_the_start_of_a_warm_up_is_accepted() -> None:
    model = Tensors(0)
    optimizer = users.Shampoo(model.parameters(), lr=0.0)
    zero_ext.prepare(model, optimizer, {"stage": 2}, whole_tensors=True)
    with pytest.raises(ValueError, match="depends on other tensors"):
        model = Tensors(0)
        optimizer = users.Coupled(model.parameters(), lr=0.0)
        zero_ext.prepare(model, optimizer, {"stage": 2}, whole_tensors=True)


def claim_state(fields: dict[str, Any]) -> None:
    fields["scalar_state"]["optimizer"]["idle.weight"]["has_state"] = True


def count_state(fields: dict[str, Any]) -> None:
    fields["scalar_state"]["optimizer"]["layers.0.bias"]["has_state"] = 1


def rename_state(fields: dict[str, Any]) -> None:
    for record in fields["slices"]:
        if record["name"] == "layers.1.weight" and record["kind"] == "scale":
            record["kind"] = "scales"


@on_ranks(1, 2)
def test_checkpoints_without_a_tensors_state_change_nothing(world: World) -> None:
    folder = world.shared_folder()
    model, optimizer = prepared(world, users.Rotated, 2, {})
    train(world, model, optimizer, 0, 2)
    zero_ext.save_checkpoint(folder, model)
    report = inspect_checkpoint(folder)
    stored = {each.name: each.bytes_by_kind for each in report.tensors}
    assert stored["layers.0.weight"]["basis[0]"] == 4 * 13**2 and stored["layers.0.weight"]["scale"] == 8
    assert stored["idle.weight"] == {"master": 36} and stored["scale"]["seen"] == 8
    manifest = Path(report.path) / "manifest.json"
    original = manifest.read_bytes()
    for change, message in (
        (claim_state, "expected the optimizer's state of 'idle.weight', got none"),
        (count_state, "optimizer state of 'layers.0.bias': expected has_state, true or false"),
        (rename_state, "scale of 'layers.1.weight': it is not in the checkpoint"),
    ):
        if world.rank == 0:
            manifest.write_bytes(original)
            edit_manifest(Path(report.path), change)
        model, optimizer = prepared(world, users.Rotated, 3, {})
        train(world, model, optimizer, 0, 1)
        before, values = optimizer.state_dict(), zero_ext.full_state_dict(model, rank0_only=False)
        with pytest.raises(ValueError, match="Nothing of the model was changed") as caught:
            zero_ext.load_checkpoint(folder, model)
        assert message in str(caught.value)
        after = optimizer.state_dict()
        assert after["scalars"] == before["scalars"] and optimizer.param_groups[0]["step"] == 1
        assert all(torch.equal(after["unsharded"][key], value) for key, value in before["unsharded"].items())
        check_values(model, values, message)


REFUSED: dict[str, str] = {
    "Coupled": "depends on other tensors",
    "NeedsClosure": "without a closure, failed: TypeError",
    "SparseOnly": "failed: RuntimeError: expected sparse gradients",
    "ObjectState": "state entry 'inner.object[0]': expected a dense real tensor, a number or None",
    "LateState": "state entry 'late' appears or changes",
    "CountsInItself": "attribute 'count' depends on earlier steps",
    "LearnsItsRate": "entry of its param groups 'seen' of group '0' depends on other tensors",
    "Wrapper": "attribute 'base' holds another optimizer",
    "OwnList": "attribute 'lists' holds parameters",
    "StepsNothing": "its step changes none of the tensors",
    "TwoEntries": "state entry 'views[0]': expected memory of its own, got that of state entry 'momentum'",
    "SharesTheParameter": "state entry 'weights': expected memory of its own, got that of the parameter",
    "OwnMasters": "state entry 'master': expected a name",
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_run_at_owners(name: str) -> None:
    model = Tensors(0)
    with pytest.raises(ValueError, match="declared with whole_tensors=True, but") as caught:
        zero_ext.prepare(model, grouped(model, getattr(users, name)), {"stage": 2}, whole_tensors=True)
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("config", "declared", "message"),
    [
        (
            {"offload": {"optimizer": "host", "update_mode": "delayed"}},
            {},
            "'after_backward' with whole_tensors",
        ),
        ({"offload": {"update_mode": "in_backward"}}, {}, "'after_backward' with whole_tensors"),
        ({"offload": {"optimizer": "nvme", "nvme_paths": ["/tmp"]}}, {}, "got 'nvme'"),
        ({}, {"elementwise": True}, "got both"),
        ({"precision": {"moments_dtype": "8bit"}}, {}, "expected Adam or AdamW"),
    ],
)
def test_what_does_not_go_with_it(config: dict[str, Any], declared: dict[str, bool], message: str) -> None:
    model = Tensors(0)
    with pytest.raises(ValueError, match=message):
        zero_ext.prepare(
            model, users.Shampoo(model.parameters()), {"stage": 2} | config, whole_tensors=True, **declared
        )


def test_undeclared_optimizers_name_the_argument() -> None:
    model = Tensors(0)
    with pytest.raises(ValueError, match="pass whole_tensors=True"):
        zero_ext.prepare(model, users.Shampoo(model.parameters()), {"stage": 2})
