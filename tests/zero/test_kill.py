"""SIGKILL amid steps with everything on NVMe: the next run goes on from the checkpoint, bit for bit.

The test runs this file as a program, which forks instead of starting processes, so that torch is imported
once; nothing else may run torch's threads there.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch._dynamo  # what prepare would import in every child
import torch.distributed as dist

import zero_ext
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.offload import NvmeStore

STEPS = 8
OFFLOAD = {"params": "nvme", "grads": "host", "optimizer": "nvme", "staging_buffer_bytes": 1 << 20}
PATTERN = torch.arange(8192, dtype=torch.float32)


class Job:
    """Where things are, and who takes part."""

    def __init__(self, folder: Path, world_size: int, seed: int) -> None:
        self.folder, self.world_size, self.seed = folder, world_size, seed
        self.nvme, self.saves = folder / "nvme", folder / "saves"
        self.nvme.mkdir()

    def prepared(self, life: int, rank: int, offload: dict[str, Any]) -> tuple[Any, Any]:
        if self.world_size > 1:
            store = f"file://{self.folder / f'store-{life}'}"
            limit = timedelta(seconds=20)
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=self.world_size, timeout=limit
            )
        torch.manual_seed(self.seed)
        model = TinyModel()
        config = {"stage": 3, "timeout_seconds": 20.0, "precision": {"dtype": "bf16"}, "offload": offload}
        return zero_ext.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)

    def step(self, model: Any, optimizer: Any, number: int, rank: int) -> float:
        loss = language_loss(model, language_batch(self.seed, number, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def reference(self, rank: int, notify: IO[str]) -> None:
        """All steps in memory."""
        model, optimizer = self.prepared(0, rank, {})
        losses = [self.step(model, optimizer, number, rank) for number in range(STEPS)]
        print(json.dumps(losses), file=notify, flush=True)

    def live(self, life: int, rank: int, notify: IO[str], last: bool) -> None:
        """On from the last checkpoint, one more after the first step, and steps until the end, or a kill."""
        dead = self.runs()
        model, optimizer = self.prepared(life, rank, {**OFFLOAD, "nvme_paths": [str(self.nvme)]})
        if not dist.is_initialized() and (left := dead & self.runs()):
            raise AssertionError(f"not removed by the next run: {left}")
        first = zero_ext.load_checkpoint(self.saves, model).step if self.saves.exists() else 0
        print(json.dumps(["first", first]), file=notify, flush=True)
        for number in itertools.count(first):
            if number >= STEPS and last:
                return
            begin = time.perf_counter()
            loss = self.step(model, optimizer, number, rank)
            if number < STEPS:
                print(json.dumps([number, loss]), file=notify, flush=True)
            if number == first:
                seconds = time.perf_counter() - begin
                zero_ext.save_checkpoint(self.saves, model)
                print(json.dumps(["saved", seconds]), file=notify, flush=True)

    def runs(self) -> set[str]:
        """The run directories there are, that of the bystander apart."""
        return {path.name for path in self.nvme.iterdir()} - {bystander(self)}


def bystander(job: Job) -> str:
    """The run directory of the job that stays alive beside the killed ones."""
    named = job.folder / "bystander"
    return named.read_text() if named.exists() else ""


def stand_by(job: Job, notify: IO[str]) -> None:
    """Keeps a store on the same path until stdin of the program ends; its bytes must not change."""
    with NvmeStore([job.nvme], reserve_bytes=1 << 20) as store:
        offset = store.allocate(PATTERN.nbytes)
        store.write(offset, PATTERN).wait()
        (directory,) = job.nvme.iterdir()
        (job.folder / "bystander").write_text(directory.name)
        print("[]", file=notify, flush=True)
        while not (job.folder / "done").exists():
            time.sleep(0.05)
        found = torch.zeros_like(PATTERN)
        store.read(offset, found).wait()
        if not torch.equal(found, PATTERN):
            raise AssertionError("the bystander's bytes have changed")


def start(work: Callable[[IO[str]], None]) -> tuple[int, IO[str]]:
    """A child that runs ``work``, and what it tells."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    code = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "w") as notify:
            work(notify)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # The interpreter's own exit is what cleans up after an error; a kill skips it.
        sys.exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def follow(received: IO[str], wanted: list[float], until: str) -> tuple[int, float]:
    """Reads a life's messages up to ``until``; every loss has to be the reference's. First step, seconds."""
    first = -1
    for line in received:
        key, value = json.loads(line)
        if key == "first":
            first = int(value)
        elif key == until:
            return first, float(value)
        elif key != "saved" and wanted[key] != value:
            raise AssertionError(f"step {key} has loss {value}, the reference {wanted[key]}")
    return first, 0.0


def kill_and_go_on(job: Job, life: int, wanted: list[list[float]], draw: random.Random) -> int:
    """One life that ends by SIGKILL of some ranks; the step it began from."""
    ranks = [start(lambda notify, r=rank: job.live(life, r, notify, False)) for rank in range(job.world_size)]
    firsts = []
    for (_, received), losses in zip(ranks, wanted, strict=True):
        first, seconds = follow(received, losses, "saved")
        firsts.append(first)
    time.sleep(draw.uniform(0, 3 * seconds))
    victims = draw.sample(range(job.world_size), draw.randint(1, job.world_size))
    for rank in victims:
        os.kill(ranks[rank][0], signal.SIGKILL)
    begin = time.monotonic()
    codes = [exit_code(child) for child, _ in ranks]
    for rank, (code, (_, received)) in enumerate(zip(codes, ranks, strict=True)):
        follow(received, wanted[rank], "end")
        if code != (-signal.SIGKILL if rank in victims else 1):
            raise AssertionError(f"rank {rank} ended with {code}; killed were {victims}")
    if time.monotonic() - begin > 25:
        raise AssertionError("the survivors did not notice")
    if len(job.runs()) != len(victims):
        raise AssertionError(f"{job.runs()} are left, {len(victims)} were killed")
    return firsts[0]


def main() -> None:
    torch.set_num_threads(1)
    folder, world_size, kills, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    draw = random.Random(seed)
    job = Job(folder, world_size, seed)
    ranks = [start(lambda notify, r=rank: job.reference(r, notify)) for rank in range(world_size)]
    wanted = [json.loads(received.readline()) for _, received in ranks]
    codes = [exit_code(child) for child, _ in ranks]
    other, ready = start(lambda notify: stand_by(job, notify))
    ready.readline()
    begun = [kill_and_go_on(job, life, wanted, draw) for life in range(1, kills + 1)]
    if begun != sorted(set(begun)):
        raise AssertionError(f"lives began from steps {begun}")
    ranks = [start(lambda notify, r=rank: job.live(kills + 1, r, notify, True)) for rank in range(world_size)]
    for (_, received), losses in zip(ranks, wanted, strict=True):
        follow(received, losses, "end")
    codes += [exit_code(child) for child, _ in ranks]
    if job.runs():
        raise AssertionError(f"left behind: {job.runs()}")
    (folder / "done").touch()
    codes.append(exit_code(other))
    if any(codes) or list(job.nvme.iterdir()):
        raise AssertionError(f"exit codes {codes}, left {list(job.nvme.iterdir())}")
    print(f"killed {kills} times, begun from {begun}")


@pytest.mark.parametrize(("world_size", "kills"), [(1, 3), (2, 2)])
def test_a_killed_run_resumes_bit_for_bit_and_leaves_nothing(
    tmp_path: Path, world_size: int, kills: int
) -> None:
    seed = secrets.randbits(20)
    print(f"seed {seed}")
    arguments = [str(tmp_path), str(world_size), str(kills), str(seed)]
    command = [sys.executable, "-m", "tests.zero.test_kill", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and done.stdout.startswith(f"killed {kills} times"), done.stdout + done.stderr


if __name__ == "__main__":
    main()
