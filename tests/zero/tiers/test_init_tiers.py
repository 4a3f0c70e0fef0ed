"""``Init`` with tiers: every shard goes where parameters live as it is cut, and nothing is whole for long."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.construction.test_sharded_init import MODELS, check_nothing_left, llama
from tests.zero.models import TinyModel
from tests.zero.training import adamw, check_same, configuration, language_steps, prepared
from zero_ext import ops
from zero_ext.offload import copy_of, count, tier_manager
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources
from zero_ext.zero.construction import sharded_init as init_module
from zero_ext.zero.tiling import replace_layers
from zero_ext.zero.units import presharded as presharded_module
from zero_ext.zero.units.presharded import PreshardedParameter, presharded_of

ROOT = Path(__file__).resolve().parents[3]


def offloaded(tier: str, folder: str, **more: Any) -> dict[str, Any]:
    paths = {"nvme_paths": [folder], "staging_buffer_bytes": 1 << 20} if tier == "nvme" else {}
    return configuration(3, offload={"params": tier, "optimizer": tier, **paths}, **more)


def names_in(folder: str | Path) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


def build(world: World, config: Any, make: Callable[[], nn.Module], limit: int) -> nn.Module:
    torch.manual_seed(world.seed)
    with (
        mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", limit),
        zero_ext.Init(config, process_group=world.group),
    ):
        return make()


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_weights_are_those_of_plain_construction(world: World, tier: str) -> None:
    makers = [*MODELS.values(), llama]
    with tempfile.TemporaryDirectory() as folder:
        for number, make in enumerate(makers[world.size % 2 :: 2]):
            torch.manual_seed(world.seed)
            plain = make()
            state = torch.get_rng_state()
            config, before = offloaded(tier, folder), names_in(folder)
            model = build(world, config, make, limit=(1, 60, 1 << 23)[(number + world.seed) % 3])
            assert torch.equal(torch.get_rng_state(), state)
            presharded = [presharded_of(parameter) for parameter in model.parameters()]
            assert all(one is not None and one.storage.tier == tier for one in presharded)
            del presharded
            stores = set(names_in(folder)) - set(before)
            assert len(stores) == (tier == "nvme")
            # One piece is a block a rank, so that there are several of a parameter.
            with mock.patch.object(presharded_module, "INIT_CHUNK_BYTES", 1):
                model, _ = zero_ext.prepare(model, None, config, process_group=world.group)
            check_same(model, plain)
            assert stores.isdisjoint(names_in(folder))
            del model


@on_ranks(1, 2)
@pytest.mark.parametrize("tiles", [{}, {"embedding": 4, "head": 4}])
def test_training_is_that_of_a_plain_model(world: World, tiles: dict[str, int]) -> None:
    losses: list[list[float]] = []
    read: list[int] = []
    fetch = PreshardedParameter._fetch

    def counting(self: PreshardedParameter, into: torch.Tensor, begin: int) -> None:
        read.append(into.nbytes)
        fetch(self, into, begin)

    counted = mock.patch.object(PreshardedParameter, "_fetch", counting)
    never = mock.patch.object(replace_layers, "unshard_presharded", side_effect=AssertionError("unsharded"))
    torch.manual_seed(world.seed)
    plain = TinyModel(tied=True)
    wanted = {name: value.flatten().clone() for name, value in plain.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        config = offloaded("nvme", folder, precision={"dtype": "bf16"}, units={"tiles": tiles})
        for model in (plain, build(world, config, lambda: TinyModel(tied=True), limit=100)):
            shards = [one for parameter in model.parameters() if (one := presharded_of(parameter))]
            stored = sum(shard.layout.shard_numel * 4 for shard in shards)
            del shards
            with counted, never:
                model, optimizer = zero_ext.prepare(
                    model, adamw(model.parameters()), config, process_group=world.group
                )
            assert tiles or sum(read) == stored
            for state_slice in checkpoint_sources(engine_of(model)).own.load_slices():
                if state_slice.kind == "master":  # as they were made, without rounding
                    end = state_slice.start + count(state_slice.tensor)
                    master = wanted[state_slice.name][state_slice.start : end]
                    assert torch.equal(copy_of(state_slice.tensor), master)
            losses.append(language_steps(world, model, optimizer, range(3)))
    assert losses[0] == losses[1]


@on_ranks(1, 2)
@pytest.mark.parametrize("tiled", ["rows", "transposed"])
def test_tiles_of_a_presharded_layer(world: World, tiled: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 5))
        if tiled == "transposed":
            model[0].weight = nn.Parameter(torch.randn(300, 700).t())
        return model

    torch.manual_seed(world.seed)
    plain = make()
    with tempfile.TemporaryDirectory() as folder:
        config = offloaded("nvme", folder, units={"tiles": {"0": 3}, "persistence_threshold": 0})
        model = build(world, config, make, limit=1)
        with mock.patch.object(presharded_module, "INIT_CHUNK_BYTES", 1 << 16):
            model, _ = zero_ext.prepare(model, None, config, process_group=world.group)
        assert max(unit.layout.numel for unit in engine_of(model).units) < 100_000
        check_same(model, plain)
        del model


@on_ranks(1, 2)
@pytest.mark.parametrize("fault", ["write", "write at the end", "read", "full"])
def test_a_fault_on_one_rank_ends_init_on_all_and_leaves_nothing(world: World, fault: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        init = zero_ext.Init(offloaded("nvme", folder), process_group=world.group)
        reason = "No space left" if fault == "full" else "Input/output error"
        pattern = "storing a parameter of zero_ext.Init failed|reading a parameter from its shards failed"
        with (
            mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", 1),
            mock.patch.object(tier_manager, "_GROWTH_BYTES", 0),
            pytest.raises(RuntimeError, match=pattern) as caught,
            init,
        ):
            store = init._parameters.storage._store  # type: ignore[union-attr]
            assert store is not None
            first = nn.Linear(50, 50)
            if world.rank == 0 and fault == "full":
                filled = RuntimeError("store: reserving failed: No space left on device")
                mock.patch.object(store, "reserve", side_effect=filled).start()
            elif world.rank == 0:
                ops.store_inject_fault(store.handle, fault != "read", 0, -errno.EIO, 1)
            second = nn.Linear(300, 50)
            if fault != "write at the end":
                nn.init.zeros_(first.weight)
                nn.init.zeros_(second.weight)
                nn.init.zeros_(second.bias)
        mock.patch.stopall()
        assert world.rank or reason in str(caught.value)
        assert names_in(folder) == []
        check_nothing_left()
        world.barrier()


@on_ranks(1, 2)
def test_an_exception_in_the_block_removes_the_files(world: World) -> None:
    made: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as folder:
        init = zero_ext.Init(offloaded("nvme", folder), process_group=world.group)
        with mock.patch.object(init_module, "UNSHARDED_ELEMENTS_LIMIT", 1):
            with pytest.raises(ZeroDivisionError), init:
                made.append(TinyModel())
                assert len(names_in(folder)) == 1
                raise ZeroDivisionError
            assert names_in(folder) == []
            check_nothing_left()
            with init:  # again, with a store of its own
                again = TinyModel()
        assert len(names_in(folder)) == 1
        with pytest.raises(RuntimeError, match="Build the model again"):
            prepared(world, made[0], 3, None)
        model, _ = prepared(world, again, 3, None)
        assert names_in(folder) == []
        assert zero_ext.full_state_dict(model)["head.weight"].isfinite().all()
        del again
        dropped = build(world, offloaded("nvme", folder), TinyModel, limit=1)
        assert len(names_in(folder)) == 1
        del dropped
        assert names_in(folder) == []


@on_ranks(2)
def test_a_path_that_one_rank_lacks(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = folder if world.rank == 0 else f"{__file__}/below a file"
        init = zero_ext.Init(offloaded("nvme", path), process_group=world.group)
        with pytest.raises(RuntimeError, match=r"setting up storage on NVMe failed on ranks \[1\]"), init:
            TinyModel()
        assert names_in(folder) == []
        check_nothing_left()


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", text, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


KILLED = """
import os, signal, sys
from torch import nn
import zero_ext
config = {"offload": {"params": "nvme", "nvme_paths": [sys.argv[1]]}}
with zero_ext.Init(config):
    nn.Linear(3000, 6000), nn.Linear(10, 10)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_crash_leaves_goes_with_the_next_run(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path).returncode == -signal.SIGKILL
    (left,) = names_in(tmp_path)
    with zero_ext.Init(offloaded("nvme", str(tmp_path))):
        assert left not in names_in(tmp_path) and len(names_in(tmp_path)) == 1
    assert names_in(tmp_path) == []


MEASURED = """
import json, sys, threading, time
import torch
from torch import nn
import zero_ext

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList()
        for _ in range(3):
            weight = nn.Parameter(torch.empty(512, 2048))
            weight.data.fill_(0.5)
            self.parts.append(weight)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def watch():
    while not done.is_set():
        peaks.append(resident())
        time.sleep(0.002)

offload = {"params": "nvme", "optimizer": "nvme", "grads": "host", "nvme_paths": [sys.argv[1]]}
offload["staging_buffer_bytes"] = 4 << 20
config = {"precision": {"dtype": "bf16"}, "offload": offload, "units": {"block_classes": ["Layer"]}}
with zero_ext.Init(config):
    warm = Layer()
zero_ext.prepare(warm, torch.optim.SGD(warm.parameters(), lr=0.1), {**config, "units": {}})
done, base, peaks = threading.Event(), resident(), []
thread = threading.Thread(target=watch)
thread.start()
with zero_ext.Init(config):
    model = nn.ModuleList(Layer() for _ in range(32))
elements = sum(parameter.numel() for parameter in model.parameters())
built = max(peaks) - base
peaks.clear()
zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
done.set()
thread.join()
print(json.dumps({"elements": elements, "built": built, "prepared": max(peaks) - base}))
"""


def test_memory_while_building_does_not_grow_with_the_model(tmp_path: Path) -> None:
    done = run(MEASURED, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    full = found["elements"] * 4
    assert full > 400e6
    unit, limit = 3 * 512 * 2048 * 4, init_module.UNSHARDED_ELEMENTS_LIMIT * 4
    # As much again as the limit may have been freed and not yet given back.
    assert found["built"] <= 2 * limit + unit + (32 << 20)
    assert found["prepared"] <= limit + unit + 2 * presharded_module.INIT_CHUNK_BYTES + (32 << 20)
    assert names_in(tmp_path) == []
