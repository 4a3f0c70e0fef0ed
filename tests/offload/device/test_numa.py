"""The processors near a device, as the kernel's tables have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from zero_ext.offload import device_memory

ADDRESS = "0000:17:00.0"


def table(folder: Path, node: str, cpus: str) -> Path:
    for path, text in (
        (f"bus/pci/devices/{ADDRESS}/numa_node", node),
        (f"devices/system/node/node{node}/cpulist", cpus),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("cpus", "wanted"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("6-7,9-9", {6, 7, 9})],
)
def test_cpus_of_a_node(tmp_path: Path, cpus: str, wanted: set[int]) -> None:
    assert device_memory.node_cpus(ADDRESS, table(tmp_path, "1", cpus)) == wanted


def test_machines_that_name_no_node(tmp_path: Path) -> None:
    assert device_memory.node_cpus(ADDRESS, tmp_path) == frozenset()
    folder = tmp_path / "bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("-1\n")
    assert device_memory.node_cpus(ADDRESS, tmp_path) == frozenset()


def test_threads_of_inside_stay_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    root = table(tmp_path, "0", str(one))
    find = device_memory.node_cpus
    monkeypatch.setattr(device_memory, "pci_address", lambda device: ADDRESS)
    monkeypatch.setattr(device_memory, "node_cpus", lambda address: find(address, root))
    with device_memory.numa_affinity(torch.device("cuda", 0)):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    for device in (torch.device("cpu"), torch.device("meta")):
        with device_memory.numa_affinity(device):
            assert os.sched_getaffinity(0) == before
    root = table(tmp_path, "0", str(max(before) + 1000))  # none that this process may use
    with device_memory.numa_affinity(torch.device("cuda", 0)):
        assert os.sched_getaffinity(0) == before


def test_a_kernel_that_refuses_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    root = table(tmp_path, "0", str(min(before)))
    find = device_memory.node_cpus
    monkeypatch.setattr(device_memory, "pci_address", lambda device: ADDRESS)
    monkeypatch.setattr(device_memory, "node_cpus", lambda address: find(address, root))
    asked: list[set[int]] = []

    def refuse(process: int, cpus: set[int]) -> None:
        asked.append(cpus)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with device_memory.numa_affinity(torch.device("cuda", 0)):
        assert os.sched_getaffinity(0) == before
    assert asked == [{min(before)}]
