"""The benchmark of pipelines, split tensors, sequences and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zero_ext
from benchmarks import parallel
from benchmarks.harness.parallel_rank import shape_of, trainer
from benchmarks.harness.parallel_trainers import Shape
from tests.benchmarks.conftest import Concluded
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

TINY = Shape(width=32, blocks=4, heads=4, window=16, micro_batches=4, samples=1)


@on_ranks(4)
@pytest.mark.parametrize("peer", ["torch-cp", "torch-ep"])
def test_contenders_on_shards_of_tokens_train_alike(world: World, peer: str) -> None:
    made = [trainer(kind, TINY, world.size) for kind in (peer, *parallel.AGAINST[peer])]
    shape = shape_of(peer, TINY)
    for step in range(4):
        for each in made:
            each.step(*shape.batch(step))
    theirs, *own = (each.model for each in made)  # type: ignore[attr-defined]
    assert isinstance(theirs, DistributedDataParallel)
    wanted = theirs.module.state_dict()
    for model in own:
        found = zero_ext.full_state_dict(model, rank0_only=False)
        for name, value in wanted.items():  # of experts those of this rank
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_program(concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two ranks as they are measured. Four simulated stages and traffic are left out."""
    full = parallel.Fullness("4 stages, simulated", 4, 4, 0.9, 0.9)
    monkeypatch.setattr(parallel, "simulated", lambda shape: ([full, full], 1e-3))
    monkeypatch.setattr(parallel, "traffic", lambda shape: [])
    monkeypatch.setattr(parallel, "STARTS", 1)
    against = {"torch-pp": ("zero-pp-2",), "torch-ep": ("zero-ep-3",)}
    monkeypatch.setattr(parallel, "AGAINST", against)
    data, status = concluded(parallel.main, 32, 4, 16, 4, 3)
    assert [each["what"] for each in data["fullness"]] == [full.what] * 2 + ["2 stages, real"] * 3
    found: dict[str, Any] = data["overheads"]
    assert found.keys() == {"torch-pp", "torch-ep", "zero-pp-2", "zero-ep-3"}
    assert all(len(each["seconds"]) == 3 for each in found.values())
    ratios = [each["ratio"] for each in found.values() if "ratio" in each]
    slow = [each for each in ratios if each["high"] > parallel.OVERHEAD_BAR]
    missed = [each for each in data["missed"] if "times a step of" in each]
    assert len(ratios) == 2 and len(missed) == len(slow) and status == int(bool(data["missed"]))
