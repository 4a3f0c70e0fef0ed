"""Staging and memory: set-up allocates what the plan says, it is enough, and a step allocates no more."""

from __future__ import annotations

import gc
import importlib
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from benchmarks.harness.allocations import AllocationCounter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import placed
from zero_ext import ops
from zero_ext.plan import model_staging
from zero_ext.zero import engine_of
from zero_ext.zero.construction.oom_report import MemoryEstimate

WIDTH = 192  # a block's matrix has 144 KiB in fp32: more than what counts as large
Make = Callable[[Any], torch.optim.Optimizer]


class Tied(nn.Module):
    """Embedding and head of one weight, blocks of two sizes between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH * size), nn.GELU(), nn.Linear(WIDTH * size, WIDTH))
            for size in (1, 2, 1, 2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 400, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [len(tokens), 400]."""
        hidden = self.embedding(tokens) + self.positions(torch.arange(len(tokens)))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lamb(parameters, lr=1e-3)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3)


def tiers(params: str, grads: str, optimizer: str) -> dict[str, str]:
    return {"params": params, "grads": grads, "optimizer": optimizer}


# The optimizer, the stage, the tiers, and more configuration.
CASES: list[tuple[Make, int, dict[str, str], dict[str, Any]]] = [
    *((adamw, stage, {}, {}) for stage in range(4)),
    (adamw, 3, tiers("device", "device", "host"), {}),
    *((make, 3, tiers("host", "host", "host"), {}) for make in (adamw, rmsprop)),
    *((make, 3, tiers("nvme", "device", "device"), {}) for make in (adamw, rmsprop)),
    (adamw, 3, tiers("nvme", "host", "host"), {}),
    *((make, 3, tiers("nvme", "nvme", "nvme"), {}) for make in (adamw, rmsprop)),
    (lamb, 3, tiers("nvme", "host", "nvme"), {}),
    (lamb, 3, {"optimizer": "host"}, {"precision": {"dtype": "bf16"}}),
    (adamw, 3, {}, {"precision": {"dtype": "bf16", "communication_dtype": "fp32"}}),
    (adamw, 2, {}, {"units": {"bucket_elements": 100_000}, "gradient_clipping": 1.0}),
    (rmsprop, 3, {}, {"units": {"persistence_threshold": 1000, "prefetch_elements": 0}}),
    (adamw, 3, {}, {"units": {"tiles": {"embedding": 4, "head": 4}}}),
    (adamw, 3, {}, {"units": {"reuse_elements": 1 << 40}}),
    (adamw, 3, {}, {"batch": {"gradient_accumulation_steps": 2}}),
    (adamw, 3, {"update_mode": "in_backward"}, {}),
    (adamw, 2, {"update_mode": "delayed", "optimizer": "host"}, {}),
]


def train(model: Any, optimizer: Any, steps: int, micro_batches: int) -> None:
    for _ in range(steps):
        for _ in range(micro_batches):
            logits = model(torch.randint(400, (16,)))
            model.backward(logits.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2)
def test_set_up_allocates_the_formula_and_steps_nothing_else(world: World) -> None:
    torch.manual_seed(world.seed)
    for make, stage, offload, more in CASES:
        with placed(offload) as section:
            check_staging(world, make, {"stage": stage, "offload": section, **more})


def check_staging(world: World, make: Make, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        twin = Tied()
    planned = model_staging(twin, make(twin.parameters()), config, world.size)
    model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model, optimizer = zero_ext.prepare(
            model, make(model.parameters()), config, process_group=world.group
        )
        micro = config.get("batch", {}).get("gradient_accumulation_steps", 1)
        engine = engine_of(model)
        assert engine.memory_breakdown()["staging"] == planned.total, config
        train(model, optimizer, 2, micro)
        gc.collect()  # or what tests before this one left goes while it is counted
        before = ops.host_buffer_bytes()
        with AllocationCounter(Path(zero_ext.__file__).parent, ["zero/tiling"]) as counter:
            train(model, optimizer, 2, micro)
    assert not counter.found, (config, make.__name__, counter.found)
    assert ops.host_buffer_bytes() == before, (config, make.__name__)
    assert engine.memory_breakdown()["staging"] == planned.total, config
    assert engine.pool.overflow.total_bytes == 0 and engine.pool.live_bytes == 0
    if make is adamw:  # nothing is set aside in vain
        assert engine.pool.high_water == planned.pool.nbytes, (config, engine.pool.high_water)


class Attending(nn.Module):
    """A block that looks at what the first one saw, as a decoder's blocks do at the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Both inputs are [n, WIDTH]."""
        return hidden + self.own(hidden).tanh() + self.other(memory).tanh()


class Decoder(nn.Module):
    """The gradient of what all blocks see is complete when the first one's is: until then all are held."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, WIDTH)
        self.blocks = nn.ModuleList(Attending() for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[len(tokens), WIDTH]"""
        hidden = memory = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, memory)
        return hidden


@on_ranks(2)
def test_a_model_that_holds_more_grows_once_and_is_named(world: World) -> None:
    model = Decoder()
    config = {"stage": 3, "units": {"prefetch_elements": 0}}
    model, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=world.group)
    pool = engine_of(model).pool
    with pytest.warns(
        RuntimeWarning, match=r"unit 'blocks.\d' needs \d+ bytes for its \w+, which \d+ bytes of"
    ):
        train(model, optimizer, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1, 1)
        held = pool.total_bytes
        train(model, optimizer, 3, 1)
    assert pool.total_bytes == held > 0 and pool.overflow.total_bytes > 0 and pool.live_bytes == 0


@on_ranks(2)
def test_whoever_gathers_more_by_himself_is_not_warned(world: World) -> None:
    config = {"stage": 3, "units": {"prefetch_elements": 0}}
    model, _ = zero_ext.prepare(Tied(), None, config, process_group=world.group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zero_ext.gathered(model.parameters()):
            assert engine_of(model).pool.overflow.total_bytes > 0
    assert engine_of(model).pool.live_bytes == 0


class Wide(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))


@pytest.mark.parametrize("optimizer", ["nvme", "host, alone", "host"])
def test_host_staging_does_not_grow_with_the_largest_tensor_nor_tiled_device_staging(optimizer: str) -> None:
    optimizer, _, alone = optimizer.partition(", ")
    stored = {} if alone else {"params": "nvme", "grads": "host", "nvme_paths": ["/unused"]}
    offload = {"optimizer": optimizer, "staging_buffer_bytes": 2**20, **stored}
    found = []
    for rows, tiles in ((20_000, 20), (40_000, 40)):
        with torch.device("meta"):
            model = Wide(rows)
        units = {"tiles": {"embedding": tiles}, "prefetch_elements": 600_000}
        plain = {"stage": 3, "offload": offload}
        configs = (plain, {**plain, "units": units})
        plans = [model_staging(model, adamw(model.parameters()), each, 2) for each in configs]
        found.append((plans[0].host, plans[1].host, plans[1].pool.nbytes))
        assert plans[0].pool.nbytes > rows * 512 * 4  # untiled, the device holds it whole
    assert found[0] == found[1]


OPTIMIZERS = {
    "adamw": adamw,
    "lamb": lamb,
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "muon": lambda p: zero_ext.Muon(p, lr=1e-3),
}
TIERS: list[dict[str, str]] = [{}, {"optimizer": "host"}, tiers("host", "host", "host")]
CODES = {"quantized_weights": "int8", "quantized_gradients": "int4", "hierarchical_partition": True}


def compare(world: World, device: str, config: dict[str, Any], optimizer: str) -> None:
    """Prepares a model, makes a step, and compares the estimate and the memory breakdown."""
    made: list[MemoryEstimate] = []

    def make(*arguments: Any) -> MemoryEstimate:
        made.append(MemoryEstimate(*arguments))
        return made[-1]

    model = TinyModel(layers=2)
    module = importlib.import_module("zero_ext.zero.api.prepare")
    with mock.patch.object(module, "MemoryEstimate", make):
        model, prepared = zero_ext.prepare(
            model, OPTIMIZERS[optimizer](model.parameters()), config, process_group=world.group, device=device
        )
    for _ in range(2):
        language_loss(model, language_batch(world.seed, 0, 0, world.rank).to(device)).backward()
        prepared.step()
        prepared.zero_grad()
    (estimate,) = made
    held = estimate.bytes_by_tier()
    breakdown = engine_of(model).memory_by_tier()
    planned = {tier: {kind: held[tier][kind] for kind in breakdown[tier]} for tier in breakdown}
    assert planned == breakdown, (config, planned, breakdown)
    matrices = sum(kinds["matrices of a step"] for kinds in held.values())
    assert (matrices > 0) == (optimizer == "muon")
    if matrices and held["device"]["matrices of a step"]:
        assert "matrices of a step" in estimate.message(0)
    trained = [unit for unit in engine_of(model).units if any(each.requires_grad for each in unit.parameters)]
    most = before = 0
    for unit in reversed(trained):  # a unit's gradients live until the next one's first comes
        width, sizes = unit.layout.dtype.itemsize, [spec.numel for spec in unit.layout.specs]
        most = max(most, unit.layout.numel * width, before + max(sizes) * width)
        before = unit.layout.numel * width
    assert held["device"]["autograd's gradients"] == most
    assert held["device"]["NCCL's buffers (estimate)"] == 0  # no NCCL here
    if engine_of(model).world_size > 1:
        with (
            mock.patch.object(estimate, "device", torch.device("cuda")),
            mock.patch.object(estimate.collectives, "in_one_order", True),
        ):
            assert estimate.bytes_by_tier()["device"]["NCCL's buffers (estimate)"] >= 32 * (4 << 20)


# Every stage and tier that go together.
PLACEMENTS = [(stage, TIERS[0]) for stage in range(4)] + [(stage, TIERS[1]) for stage in (1, 2, 3)]


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_plan_is_what_is_held(world: World, optimizer: str) -> None:
    for (stage, offload), dtype in itertools.product([*PLACEMENTS, (3, TIERS[2])], ("keep", "bf16")):
        config = {"stage": stage, "offload": offload, "precision": {"dtype": dtype}}
        compare(world, "cpu", config, optimizer)


@on_ranks(2, 4)
def test_the_plan_is_what_is_held_of_compressed_communication(world: World) -> None:
    for communication in ({"ranks_per_node": 1, **CODES}, {"shard_group_size": 2}):
        config = {"stage": 3, "communication": communication, "precision": {"dtype": "bf16"}}
        compare(world, "cpu", config, "adamw")


@on_ranks(2, stand_in=True)
def test_the_plan_is_what_is_held_on_a_device(world: World) -> None:
    torch.stand_in.set_schedule("eager")  # type: ignore[attr-defined]
    codes = {"communication": {"ranks_per_node": 1, **CODES}}
    for offload, more in (*((each, {}) for each in TIERS), ({}, codes), ({"params": "host"}, codes)):
        config = {"stage": 3, "offload": offload, "precision": {"dtype": "bf16"}, **more}
        compare(world, "stand_in:0", config, "adamw")
    torch.stand_in.set_schedule("random")  # type: ignore[attr-defined]
