"""One ActivationCheckpointing in several threads: each has its own calls and records."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.activation.blocks import fresh_seed, noted_records, same
from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation.activation_storage import MemoryActivationStorage
from zero_ext.activation.offloader import ActivationOffloader, ActivationRecord, RecordState
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.offload import CPU

THREADS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "host": {"tier": "host", "min_offload_bytes": 0},
    "nvme": {"tier": "nvme", "min_offload_bytes": 0, "buffer_bytes": 2**20},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 6 * THREADS},
    "budget": {"save_budget_bytes": 2**15, "tier": "host"},
    "saved tensors": {"mode": "offload_saved_tensors", "tier": "host", "min_offload_bytes": 0},
}


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    # torch.get_rng_state allocates a Python object while it holds the generator's lock. A collection that
    # begins there may run a callback in Python, as hypothesis registers one. The callback hands the
    # interpreter to a thread that waits for the same lock, and neither goes on.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    gc.callbacks[:] = callbacks


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
def test_threads_at_once(name: str, tmp_path: Path, frequent_thread_switches: None) -> None:
    seed, values = fresh_seed(), POLICIES[name]
    paths = {"nvme_paths": (str(tmp_path),)} if name == "nvme" else {}
    checkpointing, begin = (
        ActivationCheckpointing(ActivationCheckpointingConfig(**values, **paths)),
        threading.Barrier(THREADS),
    )

    def work(number: int) -> list[torch.Tensor]:
        begin.wait()
        return slopes(seed, number, checkpointing)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for number in range(THREADS):
        assert same(found[number], slopes(seed, number, lambda function, x: function(x)))
    assert checkpointing.used_bytes() == 0 and len(checkpointing._offloaders) == 1


def test_what_is_fetched_ahead_is_of_the_same_thread() -> None:
    """Calls of two threads in turn; backward of the one leaves those of the other where they are."""
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host", prefetch=2))
    records: list[ActivationRecord] = []
    seen: list[list[RecordState]] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append([record.state for record in records])
        return x.sin()

    first, second = (torch.ones(64, 64, requires_grad=True) * 1 for _ in range(2))
    with ThreadPoolExecutor(1) as pool, noted_records(records):
        for _ in range(3):
            first = checkpointing(noting, first)
            second = pool.submit(checkpointing, noting, second).result()
    del seen[:]
    first.sum().backward()
    assert len(seen) == 3 and seen[0][:4:2] == [RecordState.FETCHING] * 2
    assert all(states[1::2] == [RecordState.OFFLOADED] * 3 for states in seen)
    second.sum().backward()
    assert all(states[::2] == [RecordState.OFFLOADED] * 3 for states in seen[3:])


def test_one_thread_at_a_time_uses_the_storage() -> None:
    offloader, values, inside = (
        ActivationOffloader(MemoryActivationStorage("host", CPU), torch.device("cpu")),
        torch.ones(64),
        [],
    )

    def is_held(lock: Any) -> bool:
        """By this thread: another one cannot have it."""
        with ThreadPoolExecutor(1) as pool:
            acquired = pool.submit(lock.acquire, False).result()
            if acquired:
                pool.submit(lock.release).result()
        return not acquired

    names = ("put", "fetch", "release_sources", "used_bytes", "allocated_bytes")
    for name in names:
        method = getattr(offloader.storage, name)

        def noted(*arguments: Any, name: str = name, method: Callable[..., Any] = method) -> Any:
            inside.append((name, is_held(offloader._lock)))
            return method(*arguments)

        setattr(offloader.storage, name, noted)
    record = offloader.offload([values], "call")
    assert torch.equal(offloader.fetch(record, 0), values)
    offloader.release_sources()
    assert offloader.used_bytes() == 4096 and offloader.allocated_bytes()["host"] > 0
    assert {name for name, _ in inside} == set(names) and all(held for _, held in inside)
    assert not is_held(offloader._lock)


def test_subscribers_of_the_bus_may_query_it(frequent_thread_switches: None) -> None:
    checkpointing, used = (
        ActivationCheckpointing(ActivationCheckpointingConfig(tier="host", profile=True)),
        [],
    )
    checkpointing.bus.subscribe(lambda event: used.append(checkpointing.used_bytes()))
    inputs = torch.ones(64, 64, requires_grad=True)
    checkpointing(torch.sin, inputs * 1).sum().backward()
    assert used[0] == inputs.nbytes
