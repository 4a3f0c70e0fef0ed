"""Training with parameters and gradients on NVMe that reach the accelerator by cuFile, a fake one here."""

from __future__ import annotations

import errno
import re
import tempfile

import pytest
import torch

import zero_ext
from tests.accelerator.cufile.library import fake_cufile
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import language_batch, language_loss
from tests.zero.test_accelerator import on_accelerator, tiny_model, train
from tests.zero.training import Plan, check_equal

ASKED = {"aio": {"gpu_direct_storage": "auto"}}
PLANS = [Plan(steps=2, clip=0.1), Plan(steps=2, micro_batches=2, dtype="bf16", accumulation="no_sync")]


@on_ranks(1, 2, stand_in=True)
def test_training_is_the_cpus(world: World) -> None:
    library = fake_cufile()
    choices = [{"params": "nvme"}, dict.fromkeys(("params", "grads", "optimizer"), "nvme")]
    for number, offload in enumerate(choices):
        for plan in PLANS:
            before = library.counts()
            run = on_accelerator(world, number, 3, plan, offload, **ASKED)
            check_equal(run, train(world, "cpu", 3, plan, {}))
            moved = run.engine.tiers.transfers.last_moved
            after = library.counts()
            assert after.bytes_read - before.bytes_read >= 2 * moved["nvme", "device"] > 0
            assert after.bytes_written - before.bytes_written >= 2 * moved["device", "nvme"]
            if plan is PLANS[1]:
                continue
            plain = on_accelerator(world, number, 3, plan, offload)
            staging = [each.engine.memory_by_tier()["host"]["staging"] for each in (run, plain)]
            assert staging[0] < staging[1]
            assert plain.engine.tiers.transfers.last_moved == moved  # counted alike


@on_ranks(1, 2, stand_in=True)
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_failed_transfer_is_an_error_on_every_rank(world: World, call: str) -> None:
    library = fake_cufile()
    torch.get_device_module("stand_in").set_schedule("random", world.seed)
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("stand_in")
        offload = {"params": "nvme", "grads": "nvme", "optimizer": "host", "nvme_paths": [folder]}
        config = {"stage": 3, "timeout_seconds": 120.0, "offload": offload, **ASKED}
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)

        def step(number: int) -> None:
            batch = language_batch(world.seed, number, 0, world.rank).to("stand_in")
            language_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        last = world.size - 1
        if world.rank == last:
            library.fault(call, -errno.EIO)
        with pytest.raises(RuntimeError) as caught:
            step(1)
        text = str(caught.value)
        assert f"rank {last}: " in text or f"ranks [{last}]" in text, text
        if world.rank == last:
            assert re.search(rf"{call.removesuffix('e')}ing \d+ bytes at offset \d+ of '{folder}", text), text
            assert "Input/output error (errno 5)" in text, text
        del caught
        world.barrier()
