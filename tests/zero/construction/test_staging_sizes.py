"""Staging: set-up allocates what the formula says, it is enough, and a step allocates nothing else."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from benchmarks.harness.allocations import AllocationCounter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.plan import model_staging
from zero_ext.zero import engine_of

WIDTH = 192  # a block's matrix has 144 KiB in fp32: more than what counts as large
TIERS = ("device", "host", "nvme")
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


@contextmanager
def configurations(world_size: int) -> Iterator[list[tuple[dict[str, Any], Make]]]:
    """Stages, tiers, precisions and optimizers; a folder for NVMe while the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[tuple[dict[str, Any], Make]] = [({"stage": stage}, adamw) for stage in range(4)]
        for params, grads, optimizer in (
            ("device", "device", "host"),
            ("host", "host", "host"),
            ("nvme", "device", "device"),
            ("nvme", "host", "host"),
            ("nvme", "nvme", "nvme"),
        ):
            offload: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer}
            offload["staging_buffer_bytes"] = 2**20
            if "nvme" in offload.values():
                offload["nvme_paths"] = [folder]
            makes = (adamw, rmsprop) if params == optimizer or optimizer == "device" else (adamw,)
            found += [({"stage": 3, "offload": offload}, make) for make in makes]
        stored = {"params": "nvme", "grads": "host", "optimizer": "nvme"}
        found += [
            (
                {"stage": 3, "offload": {**stored, "staging_buffer_bytes": 2**20, "nvme_paths": [folder]}},
                lamb,
            ),
            ({"stage": 3, "offload": {"optimizer": "host"}, "precision": {"dtype": "bf16"}}, lamb),
            ({"stage": 3, "precision": {"dtype": "bf16", "communication_dtype": "fp32"}}, adamw),
            ({"stage": 2, "units": {"bucket_elements": 100_000}, "gradient_clipping": 1.0}, adamw),
            ({"stage": 3, "units": {"persistence_threshold": 1000, "prefetch_elements": 0}}, rmsprop),
            ({"stage": 3, "units": {"tiles": {"embedding": 4, "head": 4}}}, adamw),
            ({"stage": 3, "batch": {"gradient_accumulation_steps": 2}}, adamw),
            ({"stage": 3, "offload": {"update_mode": "in_backward"}}, adamw),
            ({"stage": 2, "offload": {"update_mode": "delayed", "optimizer": "host"}}, adamw),
        ]
        yield found


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
    package = Path(zero_ext.__file__).parent
    with configurations(world.size) as cases:
        for config, make in cases:
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
                with AllocationCounter(package, ["zero/tiling"]) as counter:
                    train(model, optimizer, 2, micro)
            assert not counter.found, (config, make.__name__, counter.found)
            assert ops.host_buffer_bytes() == before, (config, make.__name__)
            assert engine.memory_breakdown()["staging"] == planned.total, config
            assert engine.pool.overflow.total_bytes == 0 and engine.pool.live_bytes == 0
            if make is adamw:  # nothing is set aside in vain
                assert engine.pool.high_water == planned.pool.nbytes, (config, engine.pool.high_water)
            del model, optimizer, engine


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


def test_host_staging_does_not_grow_with_the_largest_tensor_nor_tiled_device_staging() -> None:
    class Wide(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(rows, 512)
            self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    offload = {
        "params": "nvme",
        "grads": "host",
        "optimizer": "nvme",
        "nvme_paths": ["/unused"],
        "staging_buffer_bytes": 2**20,
    }
    for tiers in (
        offload,
        {"optimizer": "host", "staging_buffer_bytes": 2**20},
        {**offload, "optimizer": "host"},
    ):
        found = []
        for rows, tiles in ((20_000, 20), (40_000, 40)):
            with torch.device("meta"):
                model = Wide(rows)
            units = {"tiles": {"embedding": tiles}, "prefetch_elements": 600_000}
            config = {"stage": 3, "offload": tiers, "units": units}
            plain = {"stage": 3, "offload": tiers}
            plans = [model_staging(model, adamw(model.parameters()), each, 2) for each in (plain, config)]
            found.append((plans[0].host, plans[1].host, plans[1].pool.nbytes))
            assert plans[0].pool.nbytes > rows * 512 * 4  # untiled, the device holds it whole
        assert found[0] == found[1], tiers
