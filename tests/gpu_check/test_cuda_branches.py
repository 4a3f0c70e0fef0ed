"""What the benchmarks do only on a GPU, on mocks of torch.cuda that have the real signatures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.copies import Bidirectional, pinned
from benchmarks.gpu.trial import cap_memory, peak_bytes
from tests.gpu.helpers import captured

GPU = torch.device("cuda", 0)
SPECIFIED = (
    *("Event", "synchronize", "set_per_process_memory_fraction", "max_memory_allocated", "current_stream"),
    *("Stream", "stream", "CUDAGraph", "graph"),
)


@pytest.fixture
def cuda() -> Iterator[dict[str, Any]]:
    """Mocks by name; their calls are checked against the real signatures."""
    with ExitStack() as stack:
        found = {}
        for name in SPECIFIED:
            found[name] = stack.enter_context(mock.patch(f"torch.cuda.{name}", autospec=True))
        yield found


def test_the_clock_reads_events(cuda: dict[str, Any]) -> None:
    begin, end = mock.Mock(), mock.Mock()
    begin.elapsed_time.return_value = 6.0
    cuda["Event"].side_effect = [begin, end]
    calls: list[int] = []
    assert Clock(GPU).seconds(lambda: calls.append(1), times=3) == pytest.approx(2e-3)
    assert len(calls) == 3
    cuda["Event"].assert_called_with(enable_timing=True)
    end.synchronize.assert_called_once_with()
    begin.elapsed_time.assert_called_once_with(end)


def test_the_hosts_clock_waits_for_the_device(cuda: dict[str, Any]) -> None:
    assert Clock(GPU).wall_seconds(lambda: None) >= 0.0
    assert cuda["synchronize"].call_count == 2


def test_pinned_memory_is_registered_and_released(cuda: dict[str, Any]) -> None:
    registered: dict[int, int] = {}

    def register(pointer: int, nbytes: int, flags: int) -> int:
        assert pointer not in registered and flags == 0
        registered[pointer] = nbytes
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda pointer: registered.pop(pointer)
    )
    with mock.patch("torch.cuda.cudart", return_value=runtime), mock.patch("torch.cuda.check_error"):
        with pinned(8192, GPU) as buffer:
            assert registered == {buffer.data_ptr(): 8192} and bool((buffer == 1).all())
        assert registered == {}


def test_copies_in_both_directions_use_a_stream_of_their_own(cuda: dict[str, Any]) -> None:
    both = Bidirectional(GPU)
    first, second, third, fourth = (torch.full((8,), number) for number in range(4))
    both.copy((first, second), (third, fourth))
    assert int(first[0]) == 1 and int(third[0]) == 3
    cuda["stream"].assert_called_once_with(cuda["Stream"].return_value)


def test_the_cap_is_a_share_of_the_devices_memory(cuda: dict[str, Any]) -> None:
    with mock.patch(
        "torch.cuda.get_device_properties",
        autospec=True,
        return_value=SimpleNamespace(total_memory=128 << 30),
    ):
        cap_memory(GPU, 32 << 30)
        cap_memory(GPU, 256 << 30)
    assert [call.args for call in cuda["set_per_process_memory_fraction"].call_args_list] == [
        (0.25, GPU),
        (1.0, GPU),
    ]
    cuda["max_memory_allocated"].return_value = 77
    assert peak_bytes(GPU) == 77 and peak_bytes(torch.device("cpu")) == 0


def test_a_graph_is_captured_after_warming_up(cuda: dict[str, Any]) -> None:
    calls: list[int] = []
    replay = captured(GPU, lambda: calls.append(1))
    assert len(calls) == 2
    replay()
    cuda["CUDAGraph"].return_value.replay.assert_called_once_with()
