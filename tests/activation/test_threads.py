"""One Checkpointing in several threads at once: each has its own calls and meets no record of another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.activation.blocks import fresh_seed, noted_records, same
from zero_ext.activation import Checkpointing
from zero_ext.activation.activation_storage import MemoryRoom
from zero_ext.activation.offloader import Keeper, Record, State
from zero_ext.config import ActivationPolicy
from zero_ext.offload import CPU

THREADS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "host": {"tier": "host", "smallest_bytes": 0},
    "nvme": {"tier": "nvme", "smallest_bytes": 0, "buffer_bytes": 2**20},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 6 * THREADS},
    "budget": {"keep_bytes": 2**15, "tier": "host"},
    "saved tensors": {"mode": "saved_tensors", "tier": "host", "smallest_bytes": 0},
}


@pytest.fixture
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def slopes(seed: int, number: int, run: Callable[..., Any]) -> list[torch.Tensor]:
    """Of six calls in each of five passes; what a thread computes is its own."""
    generator, found = torch.Generator().manual_seed(seed + number), []
    for _ in range(5):
        inputs = torch.randn(32, 32, generator=generator).requires_grad_()
        hidden = inputs * 1
        for _ in range(6):
            hidden = run(lambda x: (x @ x).tanh(), hidden)
        found.append(torch.autograd.grad(hidden.sum(), inputs)[0])
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_threads_at_once(name: str, tmp_path: Path, threads_take_turns_often: None) -> None:
    seed, values = fresh_seed(), POLICIES[name]
    paths = {"nvme_paths": (str(tmp_path),)} if name == "nvme" else {}
    checkpointing, begin = Checkpointing(ActivationPolicy(**values, **paths)), threading.Barrier(THREADS)

    def work(number: int) -> list[torch.Tensor]:
        begin.wait()
        return slopes(seed, number, checkpointing)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for number in range(THREADS):
        assert same(found[number], slopes(seed, number, lambda function, x: function(x)))
    assert checkpointing.kept_bytes() == 0 and len(checkpointing._keepers) == 1


def test_what_is_fetched_ahead_is_of_the_same_thread() -> None:
    """Calls of two threads in turn; backward of the one leaves those of the other where they are."""
    checkpointing = Checkpointing(ActivationPolicy(tier="host", prefetch=2))
    kept: list[Record] = []
    seen: list[list[State]] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append([record.state for record in kept])
        return x.sin()

    here, there = (torch.ones(64, 64, requires_grad=True) * 1 for _ in range(2))
    with ThreadPoolExecutor(1) as pool, noted_records(kept):
        for _ in range(3):
            here = checkpointing(noting, here)
            there = pool.submit(checkpointing, noting, there).result()
    del seen[:]
    here.sum().backward()
    assert len(seen) == 3 and seen[0][:4:2] == [State.FETCHING] * 2
    assert all(states[1::2] == [State.KEPT] * 3 for states in seen)
    there.sum().backward()
    assert all(states[::2] == [State.KEPT] * 3 for states in seen[3:])


def test_one_thread_at_a_time_is_in_the_room() -> None:
    keeper, values, inside = Keeper(MemoryRoom("host", CPU), torch.device("cpu")), torch.ones(64), []

    def is_held(lock: Any) -> bool:
        """By this thread: another one cannot have it."""
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(lock.acquire, False).result()
            if taken:
                pool.submit(lock.release).result()
        return not taken

    names = ("put", "fetch", "let_go", "kept_bytes", "held_bytes")
    for name in names:
        method = getattr(keeper.room, name)

        def noted(*given: Any, name: str = name, method: Callable[..., Any] = method) -> Any:
            inside.append((name, is_held(keeper._lock)))
            return method(*given)

        setattr(keeper.room, name, noted)
    record = keeper.keep([values], "call")
    assert torch.equal(keeper.fetch(record, 0), values)
    keeper.let_go()
    assert keeper.kept_bytes() == 4096 and keeper.held_bytes()["host"] > 0
    assert {name for name, _ in inside} == set(names) and all(held for _, held in inside)
    assert not is_held(keeper._lock)


def test_who_hears_of_the_work_may_ask(threads_take_turns_often: None) -> None:
    checkpointing, heard = Checkpointing(ActivationPolicy(tier="host", profile=True)), []
    checkpointing.bus.subscribe(lambda event: heard.append(checkpointing.kept_bytes()))
    inputs = torch.ones(64, 64, requires_grad=True)
    checkpointing(torch.sin, inputs * 1).sum().backward()
    assert heard[0] == inputs.nbytes
