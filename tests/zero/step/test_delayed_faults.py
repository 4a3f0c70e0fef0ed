"""Storage that fails during a delayed update: an error on all ranks, before any of them waits."""

from __future__ import annotations

import errno
import tempfile
import time
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext import ops
from zero_ext.zero import engine_of


def prepared(world: World, folder: str, clip: float) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    model = TinyModel()
    config = {
        "stage": 2,
        "timeout_seconds": 30.0,
        "gradient_clipping": clip,
        "offload": {"update_mode": "delayed", "optimizer": "host", "grads": "nvme", "nvme_paths": [folder]},
    }
    return zero_ext.prepare(model, torch.optim.AdamW(model.parameters()), config, process_group=world.group)


def backward(world: World, model: Any, number: int) -> None:
    language_loss(model, language_batch(world.seed, number, 0, world.rank)).backward()


@on_ranks(2, 3)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_failed_read_of_gradients_is_an_error_on_all_ranks(world: World, clip: float) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        runs = {}
        for faulty in (False, True):
            model, optimizer = prepared(world, nvme, clip)
            for number in range(3):
                if number == 1:
                    model.finish_update()  # A repeated backward reads the parameters after the first update.
                backward(world, model, number)
                if number == 1 and faulty and world.rank == 1:
                    store = engine_of(model).tiers.store
                    ops.store_inject_fault(store.handle, False, 0, -errno.EIO, 1)
                if number == 1 and faulty:
                    began = time.monotonic()
                    with pytest.raises(
                        RuntimeError, match=r"reading gradients.* failed on ranks \[1\]"
                    ) as caught:
                        optimizer.step()
                    assert time.monotonic() - began < 10  # of 30 seconds
                    assert ("Input/output error" in str(caught.value)) == (world.rank == 1)
                    assert "No parameter or optimizer state was changed" in str(caught.value)
                    optimizer.zero_grad()
                    backward(world, model, number)
                optimizer.step()
                optimizer.zero_grad()
            runs[faulty] = zero_ext.full_state_dict(model)
            assert engine_of(model).steps == 3
        assert all(torch.equal(value, runs[True][name]) for name, value in runs[False].items())
        world.barrier()
