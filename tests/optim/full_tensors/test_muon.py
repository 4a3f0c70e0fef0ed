"""Muon over shards: in every stage, tier and number of ranks torch's own in one process, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import configuration, placed
from zero_ext.optim.full_tensors import muon, muon_stepper
from zero_ext.zero import engine_of

STEPS = 5
LONG = 20  # steps of the comparison with torch in all stages and tiers
SHORT = 2
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
TIERS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, {"optimizer": "host"}),
    (1, {"optimizer": "nvme"}),
    (2, {}),
    (2, {"grads": "host", "optimizer": "host"}),
    (2, {"grads": "host", "optimizer": "nvme"}),
    (3, {}),
    (3, HOST),
    (3, dict.fromkeys(HOST, "nvme")),
    (3, {"update_mode": "in_backward"}),
    (1, {"optimizer": "host", "update_mode": "delayed"}),
    (3, {**dict.fromkeys(HOST, "nvme"), "update_mode": "delayed"}),
]
LARGE: dict[str, Any] = {"units": {"persistence_threshold": 10_000}}
MIXED: dict[str, Any] = {"units": {"persistence_threshold": 100, "bucket_elements": 600}}


class Matrices(nn.Module):
    """Wide, tall and flat ones, one stored by columns, and one that no loss uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = (12, 40, 24, 33)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
        self.columns = nn.Parameter(torch.randn(33, 5).T.mul(0.2))
        self.last = nn.Linear(5, 1, bias=False)
        self.idle = nn.Linear(3, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Values [n, 1] for inputs [n, 12]."""
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.last((inputs @ self.columns.T).tanh())


def batch(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 * step + rank)
    return torch.randn(6, 12, generator=generator), torch.randn(6, 1, generator=generator)


def loss_of(model: nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(seed, step, rank)
    return nn.functional.mse_loss(model(inputs), targets)


def make(model: nn.Module, ns_dtypes: tuple[str, ...] = (), **settings: Any) -> torch.optim.Optimizer:
    """Torch's Muon, or zero_ext's with a group for each of ``ns_dtypes``."""
    settings, own = {"lr": 0.02, **settings}, list(model.parameters())
    if not ns_dtypes:
        return torch.optim.Muon(own, **settings)
    groups = [
        {"params": own[number :: len(ns_dtypes)], "ns_dtype": ns_dtype, "use_muon": True}
        for number, ns_dtype in enumerate(ns_dtypes)
    ]
    return zero_ext.Muon(groups, **settings)


def plain(
    world: World, steps: int = STEPS, **settings: Any
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by step and rank, and the parameters after it, of the optimizer of :func:`make`: gradients are
    added up in the order of ranks, as the engine does."""
    model = Matrices(world.seed)
    optimizer, losses = make(model, **settings), []
    for step in range(steps):
        losses.append([])
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(world.size):
            loss = loss_of(model, world.seed, step, rank)
            used = [each for each in model.parameters() if each is not model.idle.weight]
            for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
                sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient.clone()
            losses[-1].append(loss.item())
        for parameter, total in sums.items():
            # By rows, as the engine has it: without bf16 instructions torch's products round by layout.
            parameter.grad = (total * (1.0 / world.size)).contiguous()
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def sharded(
    world: World,
    stage: int,
    offload: dict[str, Any],
    clipping: float = 0.0,
    units: dict[str, Any] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> tuple[Any, Any, list[float]]:
    model = Matrices(world.seed)
    with placed(offload) as section:
        config = configuration(stage, offload=section, gradient_clipping=clipping, **(units or MIXED))
        model, optimizer = zero_ext.prepare(model, make(model, **settings), config, process_group=world.group)
        losses = []
        for step in range(steps):
            loss = loss_of(model, world.seed, step, world.rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            model.finish_update()  # so that a delayed one is not stale
        return model, zero_ext.full_state_dict(model, rank0_only=False), losses


@on_ranks(1, 2, 3, 4, by_turns=True)
@pytest.mark.parametrize(("stage", "offload"), TIERS)
def test_equals_torchs_own(world: World, stage: int, offload: dict[str, Any]) -> None:
    losses, parameters = plain(world, LONG)
    _, found, own = sharded(world, stage, offload, steps=LONG)
    assert own == [each[world.rank] for each in losses], (own, losses)
    for name, value in parameters.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("shape", [(260, 270), (270, 260)])
@mock.patch.object(muon, "LEAST_PANEL", 64)  # large products take long on CPUs without bf16 instructions
def test_symmetric_products_by_panels(generator: torch.Generator, shape: tuple[int, int]) -> None:
    """Bits may differ from torch's: bfloat16 amplifies what rounds apart."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=generator)
    expected = nn.Parameter(torch.zeros(shape))
    expected.grad = parameter.grad.clone()
    with mock.patch.object(muon, "_mirror", wraps=muon._mirror) as mirrored:
        zero_ext.Muon([parameter], lr=1.0).step()
    torch.optim.Muon([expected], lr=1.0).step()
    assert mirrored.call_count == 4 * 2 * 5
    assert (parameter - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (12, 12)])
def test_stacks_of_small_matrices_are_torchs(generator: torch.Generator, shape: tuple[int, int]) -> None:
    """Products of a batch differ in the last bits of about one such matrix in a hundred."""
    group = zero_ext.Muon([torch.zeros(2, 2)], lr=1.0).param_groups[0]
    stack = torch.randn(200, *shape, generator=generator)
    expected = [torch.zeros(shape).requires_grad_() for _ in stack]
    for parameter, gradient in zip(expected, stack, strict=True):
        parameter.grad = gradient
    torch.optim.Muon(expected, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    wanted = torch.stack(expected).detach()
    found = muon.newton_schulz(stack, group)
    scale = -muon.adjusted_lr(group, shape)
    assert torch.equal(torch.zeros_like(wanted).add_(found, alpha=scale), wanted)
    exact = {**group, "ns_dtype": "fp32"}
    batch = muon._orthogonal_factor(stack, exact)  # as on a GPU
    torch.testing.assert_close(batch, muon.newton_schulz(stack, exact), rtol=0, atol=1e-4)


@on_ranks(1, stand_in=True)
@pytest.mark.parametrize("shape", [(16, 4), (12, 12)])
def test_devices_compute_one_matrix_as_torch_does_and_several_in_a_batch(
    world: World, shape: tuple[int, int]
) -> None:
    torch.manual_seed(world.seed)
    stack = torch.randn(200, *shape)
    group = zero_ext.Muon([torch.zeros(2, 2)], lr=1.0).param_groups[0]
    wanted = muon.newton_schulz(stack, group)
    found = [muon.newton_schulz(each[None], group).cpu()[0] for each in stack.to("stand_in")]
    assert torch.equal(torch.stack(found), wanted)
    exact = {**group, "ns_dtype": "fp32"}
    batch = muon.newton_schulz(stack.to("stand_in"), exact)
    torch.testing.assert_close(batch.cpu(), muon.newton_schulz(stack, exact), rtol=0, atol=1e-4)


@on_ranks(2, 3, by_turns=True)
def test_waves_change_nothing(world: World) -> None:
    _, parameters = plain(world, SHORT)
    for stage, offload in TIERS:
        for units in (MIXED, LARGE):
            with mock.patch.object(muon_stepper, "WAVE_ELEMENTS", 1):
                _, found, _ = sharded(world, stage, offload, units=units, steps=SHORT)
            for name, value in parameters.items():
                assert torch.equal(found[name], value), (stage, offload, name)


@on_ranks(2)
@pytest.mark.parametrize("clipping", [0.05, 1e3])
def test_updates_in_backward_that_are_rolled_back_or_not(world: World, clipping: float) -> None:
    found = []
    for offload in (
        {},
        {"update_mode": "in_backward"},
        {"update_mode": "in_backward", "grads": "host", "optimizer": "nvme"},
    ):
        found.append(sharded(world, 3, offload, clipping)[1])
    for name, value in found[0].items():
        assert all(torch.equal(other[name], value) for other in found), name


@on_ranks(2)
@pytest.mark.parametrize("what", ["unused", "nan"])
def test_ranks_that_differ_in_what_is_ready(world: World, what: str) -> None:
    """Where one rank cannot update a unit in backward, none does, and nobody waits for it."""
    model, offload = Matrices(world.seed), {"update_mode": "in_backward"}
    config = configuration(2, offload=offload, **MIXED)
    model, optimizer = zero_ext.prepare(model, make(model), config, process_group=world.group)
    before = zero_ext.full_state_dict(model, rank0_only=False)
    loss = loss_of(model, world.seed, 0, world.rank)
    if world.rank == 1 and what == "nan":
        loss = loss * float("nan")
    elif world.rank == 1:
        loss = model.layers[0](batch(world.seed, 0, 1)[0]).square().mean()
    loss.backward()
    if what == "nan":
        with pytest.raises(FloatingPointError, match="got NaN or infinity"):
            optimizer.step()
    else:
        optimizer.step()
    after = zero_ext.full_state_dict(model, rank0_only=False)
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == (set() if what == "nan" else {name for name in before if "idle" not in name})


@on_ranks(2)
@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
def test_a_step_that_breaks_off_is_known_as_damage(world: World, mode: str) -> None:
    model = Matrices(world.seed)
    config = configuration(2, offload={"update_mode": mode}, **MIXED)
    model, optimizer = zero_ext.prepare(model, make(model), config, process_group=world.group)
    failing = mock.patch.object(muon_stepper, "newton_schulz", side_effect=torch.OutOfMemoryError("full"))
    with failing, pytest.raises(RuntimeError, match=r"failed on ranks \["):
        loss_of(model, world.seed, 0, world.rank).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="damaged"):
        optimizer.step()


@on_ranks(3)
def test_a_matrix_that_one_rank_freezes(world: World) -> None:
    model = Matrices(world.seed)
    config = configuration(2, offload={"update_mode": "in_backward"}, **LARGE)
    model, optimizer = zero_ext.prepare(model, make(model), config, process_group=world.group)
    model.layers[1].weight.requires_grad_(world.rank != 1)
    loss_of(model, world.seed, 0, world.rank).backward()
    optimizer.step()
    found = zero_ext.full_state_dict(model, rank0_only=False)
    assert all(torch.isfinite(value).all() for value in found.values())


@on_ranks(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"nesterov": False, "momentum": 0.5, "ns_steps": 2},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "lr": 0.1},
    ],
)
def test_settings(world: World, settings: dict[str, Any]) -> None:
    _, parameters = plain(world, **settings)
    _, found, _ = sharded(world, 3, {}, **settings)
    for name, value in parameters.items():
        assert torch.equal(found[name], value), name


class Mixed(nn.Module):
    """Matrices, and parameters that AdamW steps: biases, a norm, an embedding that is marked."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(9, 24)
        self.tokens.weight.use_muon = False  # type: ignore[assignment]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 24)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean squares of outputs for ids [n]."""
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (self.norm(hidden) - ids[:, None] / 9).square().mean()


SETTINGS: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "adamw": {"lr": 3e-3, "eps": 1e-3}}


def ids_of(seed: int, step: int, rank: int) -> torch.Tensor:
    return torch.randint(9, (14,), generator=torch.Generator().manual_seed(seed + 10 * step + rank))


def mixed_losses(model: Any, optimizers: Any, world: World) -> list[float]:
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for rank in range(world.size):
            loss = model(ids_of(world.seed, step, rank)) / world.size
            loss.backward()
            losses[-1] += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_ranks(1)
def test_the_optimizer_by_itself_is_torchs_two(world: World) -> None:
    own, twin = Mixed(world.seed), Mixed(world.seed)
    matrices = [each for each in twin.parameters() if each.dim() == 2 and each is not twin.tokens.weight]
    rest = [each for each in twin.parameters() if not any(each is matrix for matrix in matrices)]
    settings = {key: value for key, value in SETTINGS.items() if key != "adamw"}
    two = torch.optim.Muon(matrices, **settings), torch.optim.AdamW(rest, **SETTINGS["adamw"])
    optimizer = zero_ext.Muon(own.parameters(), **SETTINGS)
    assert mixed_losses(own, [optimizer], world) == mixed_losses(twin, two, world)
    for name, value in twin.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name


@on_ranks(1, 2, 3, by_turns=True)
def test_matrices_and_the_rest_in_one_optimizer(world: World) -> None:
    model = Mixed(world.seed)
    wanted = mixed_losses(model, [zero_ext.Muon(model.parameters(), **SETTINGS)], world)
    seen: dict[str, torch.Tensor] = {}
    for stage, offload in TIERS:
        model = Mixed(world.seed)
        with placed(offload) as section:
            config = configuration(stage, offload=section, **MIXED)
            optimizer = zero_ext.Muon(model.parameters(), **SETTINGS)
            model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
            losses = []
            for step in range(STEPS):
                loss = model(ids_of(world.seed, step, world.rank))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                model.finish_update()
                losses.append(loss.item())
            totals = engine_of(model).collectives.sum_(torch.tensor(losses, dtype=torch.float64), "losses")
            found = zero_ext.full_state_dict(model, rank0_only=False)
            breakdown = engine_of(model).memory_by_tier()
        assert (totals / world.size).tolist() == pytest.approx(wanted, rel=1e-5), (
            (totals / world.size).tolist(),
            wanted,
        )
        seen = seen or found
        assert all(torch.equal(value, found[name]) for name, value in seen.items()), (stage, offload)
        if stage in (1, 2, 3) and not offload:
            matrices = 6 * 24 * 36
            rest = sum(map(torch.numel, Mixed(0).parameters())) - matrices
            masters = 0  # they are the parameters
            planned = (4 * matrices + 8 * rest) / world.size + masters
            assert breakdown["device"]["optimizer"] == pytest.approx(planned, rel=0.1)


@on_ranks(2)
def test_resumed_in_another_stage_and_tier(world: World) -> None:
    def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            model(ids_of(world.seed, step, world.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(stage: int, section: dict[str, Any]) -> tuple[Any, Any]:
        model = Mixed(world.seed)
        config = configuration(stage, offload=section, **MIXED)
        return zero_ext.prepare(
            model, zero_ext.Muon(model.parameters(), **SETTINGS), config, process_group=world.group
        )

    folder = world.shared_folder()
    with placed({"grads": "host", "optimizer": "nvme"}) as section:
        model, optimizer = made(3, {})
        steps(model, optimizer, 0, 3)
        zero_ext.save_checkpoint(folder, model)
        steps(model, optimizer, 3, 6)
        wanted = zero_ext.full_state_dict(model, rank0_only=False)
        model, optimizer = made(2, section)
        zero_ext.load_checkpoint(folder, model)
        steps(model, optimizer, 3, 6)
        found = zero_ext.full_state_dict(model, rank0_only=False)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@on_ranks(2, 3)
def test_each_matrix_is_orthogonalized_once_and_travels_twice(world: World) -> None:
    shapes: list[tuple[int, ...]] = []
    original = muon_stepper.newton_schulz

    def counting(matrices: torch.Tensor, group: Any) -> torch.Tensor:
        shapes.extend(tuple(matrix.shape) for matrix in matrices)
        return original(matrices, group)

    with mock.patch.object(muon_stepper, "newton_schulz", counting):
        model, _, _ = sharded(world, 2, {})
    engine = engine_of(model)
    used = [value for name, value in Matrices(0).named_parameters() if "idle" not in name]
    counts = torch.tensor([shapes.count(tuple(value.shape)) for value in used])
    assert engine.collectives.sum_(counts, "counts").tolist() == [STEPS] * len(used)
    sent = torch.tensor([engine.collectives.traffic.last_bytes_sent["matrices"]])
    matrix_bytes = 2 * sum(map(torch.numel, used))
    assert 0 < engine.collectives.sum_(sent, "bytes").item() <= 2 * matrix_bytes
