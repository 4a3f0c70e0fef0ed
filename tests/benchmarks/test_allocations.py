"""The counter of allocations: whose they are, and which."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.harness.allocations import LARGE, AllocationCounter

FOLDER = Path(__file__).parent


def test_counts_own_large_new_memory_only() -> None:
    values = torch.ones(LARGE // 4)
    with AllocationCounter(FOLDER) as counter:
        values.add_(1)
        values.view(2, -1)[0].fill_(3)
        torch.ones(LARGE // 4 - 1)
    assert not counter.found
    with AllocationCounter(FOLDER) as counter:
        for _ in range(3):
            values + 1
    assert list(counter.found.values()) == [3]
    assert "test_allocations.py" in next(iter(counter.found)) and "add" in next(iter(counter.found))


def test_what_torch_allocates_by_itself_is_its_own() -> None:
    layer = torch.nn.Linear(200, 200)
    inputs = torch.randn(100, 200)
    optimizer = torch.optim.AdamW(layer.parameters())
    with AllocationCounter(FOLDER) as counter:
        loss = layer(inputs).sum()
        loss.backward()
        optimizer.step()
    assert not counter.found


def test_exempt_paths_are_not_counted() -> None:
    with AllocationCounter(FOLDER.parent, [FOLDER.name]) as counter:
        torch.ones(LARGE)
    assert not counter.found
    with AllocationCounter(FOLDER.parent, ["zero"]) as counter:
        torch.ones(LARGE)
    assert counter.found
