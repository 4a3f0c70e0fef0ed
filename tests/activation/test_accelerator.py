"""On an accelerator: copies beside the computation, pinned memory, storage through it, random numbers."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.activation.blocks import same
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.activation import ActivationCheckpointing, RandomStreams
from zero_ext.activation.activation_storage import Fill
from zero_ext.config import ActivationCheckpointingConfig

DEVICE = "stand_in:0"
WIDTH, ROWS, DEPTH = 64, 64, 5
NBYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    """Changes its own result in place, as activation functions do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).tanh_())


def slopes(blocks: nn.ModuleList, seed: int, run: Callable[..., Any] | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE).requires_grad_()
    hidden = features * 1
    blocks.zero_grad()
    for block in blocks:
        before = hidden
        hidden = block(hidden) if run is None else run(block, hidden)
        if run is not None:
            with torch.no_grad():  # the memory is used again at once: what was kept must be a copy in time
                before.zero_()
    hidden.square().mean().backward()
    return [features.grad.cpu(), *(each.grad.cpu() for each in blocks.parameters())]


def policies(folder: str) -> list[dict[str, Any]]:
    nvme = {"tier": "nvme", "nvme_paths": (folder,), "buffer_bytes": 2**20}
    return [
        {"tier": "host"},
        {"tier": "host", "prefetch": 3},
        {"tier": "host", "contiguous_memory_optimization": True, "number_checkpoints": DEPTH},
        {"contiguous_memory_optimization": True, "number_checkpoints": DEPTH},
        {"synchronize_checkpoint_boundary": True, **nvme},
        nvme,
    ]


@on_ranks(1, stand_in=True)
def test_gradients_are_the_same_bits(world: World) -> None:
    torch.manual_seed(world.seed)
    blocks = nn.ModuleList(Block() for _ in range(DEPTH)).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        for values in policies(folder):
            checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**values))
            for step in range(3):
                wanted = slopes(blocks, world.seed + step, None)
                assert same(slopes(blocks, world.seed + step, checkpointing), wanted), values
            gc.collect()
            assert checkpointing.used_bytes() == 0
        values = {"mode": "offload_saved_tensors", "tier": "host", "min_offload_bytes": 0}
        checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**values))
        wanted = slopes(blocks, world.seed, None)

        def run(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            return checkpointing(block, hidden.clone())

        for _ in range(2):
            assert same(slopes(blocks, world.seed, run), wanted)


@on_ranks(1, stand_in=True)
def test_nothing_of_moved_inputs_stays_on_the_device(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for values in policies(folder)[:1] + policies(folder)[-1:]:
            checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**values))
            hidden = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
            gone: list[StorageWeakRef] = []
            hidden = checkpointing(torch.sin, hidden * 1)
            (offloader,) = checkpointing._offloaders.values()
            put = offloader.storage.put

            def noted(
                nbytes: int, fill: Fill, gone: list[StorageWeakRef] = gone, put: Callable[..., Any] = put
            ) -> Any:
                def filled(data: torch.Tensor) -> None:
                    gone.append(StorageWeakRef(data.untyped_storage()))
                    fill(data)

                return put(nbytes, filled)

            offloader.storage.put = noted  # type: ignore[method-assign]
            with checkpointing:
                for _ in range(DEPTH - 1):
                    inputs = hidden * 1
                    gone.append(StorageWeakRef(inputs.untyped_storage()))
                    hidden = checkpointing(torch.sin, inputs)
                    del inputs
                # What the last two calls kept may still be on its way.
                assert [each.expired() for each in gone[:-4]] == [True] * (2 * DEPTH - 6)
                assert not gone[-1].expired()
            assert all(each.expired() for each in gone)
            held = checkpointing.allocated_bytes()
            assert held["device"] == 0 and held[values["tier"]] > 0
            assert checkpointing.used_bytes() == DEPTH * NBYTES
            hidden.sum().backward()


@on_ranks(1, stand_in=True)
def test_the_device_is_waited_for_at_the_boundaries(world: World) -> None:
    for waits in (False, True):
        checkpointing = ActivationCheckpointing(
            ActivationCheckpointingConfig(synchronize_checkpoint_boundary=waits)
        )
        done: list[str] = []

        def noting(x: torch.Tensor, done: list[str] = done) -> torch.Tensor:
            done.append("run")
            return x.sin()

        inputs = torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True)
        with mock.patch.object(torch.accelerator, "synchronize", lambda done=done: done.append("wait")):
            out = checkpointing(noting, inputs * 1)
            done.append("backward")
            out.sum().backward()
        once = ["wait", "run", "wait"] if waits else ["run"]
        assert done == [*once, "backward", *once]


@on_ranks(1, stand_in=True)
def test_saved_tensors_of_either_memory(world: World) -> None:
    """A model that trains in the host's memory beside an accelerator has its saved tensors moved too."""
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(mode="offload_saved_tensors", tier="host", min_offload_bytes=0)
    )
    for device in ("cpu", DEVICE):
        inputs = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        with checkpointing.saved_tensors():
            out = (inputs * 1).sin()
        assert checkpointing.used_bytes() == NBYTES
        out.sum().backward()
        assert torch.equal(inputs.grad.cpu(), inputs.detach().cos().cpu())
        del out
        assert checkpointing.used_bytes() == 0


@on_ranks(2, stand_in=True)
def test_partitioned(world: World) -> None:
    torch.manual_seed(world.seed)
    blocks = nn.ModuleList(Block() for _ in range(DEPTH)).to(DEVICE)
    wanted = slopes(blocks, world.seed, None)
    for values in ({}, {"tier": "host"}):
        checkpointing = ActivationCheckpointing(
            ActivationCheckpointingConfig(partition_activations=True, **values),
            world.group,
            timeout_seconds=120.0,
        )
        for _ in range(2):
            assert same(slopes(blocks, world.seed, checkpointing), wanted)
        out = checkpointing(torch.sin, torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True) * 1)
        gc.collect()
        assert checkpointing.used_bytes() == NBYTES // 2
        out.sum().backward()


@on_ranks(1, stand_in=True)
def test_random_numbers_of_the_device(world: World) -> None:
    streams = RandomStreams()
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host"), streams=streams)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with streams.fork():
            first = torch.rand(ROWS, WIDTH, device=DEVICE)
        return x * first * torch.rand(ROWS, WIDTH, device=DEVICE) * torch.rand(ROWS, WIDTH).to(DEVICE)

    found = []
    for run in (lambda function, x: function(x), checkpointing):
        streams.seed_model_parallel(world.seed, 3)
        torch.stand_in.manual_seed(world.seed)  # type: ignore[attr-defined]
        inputs = torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True)
        run(dropped, run(dropped, inputs * 1)).sum().backward()
        found.append([inputs.grad.cpu(), torch.rand(2, device=DEVICE).cpu(), torch.rand(2)])
    assert same(*found)
