"""``zero-ext env``: facts that can be checked otherwise, and reasons where there are none."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cli.command import run, run_json
from tests.ops import fake_toolkit
from zero_ext import ops
from zero_ext.cli import environment
from zero_ext.ops.jit import jit_build, toolchain


def facts() -> dict[str, dict[str, str]]:
    return run_json("env", "--json")


def test_json_holds_what_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = facts()
    assert found["versions"]["torch"] == torch.__version__
    assert ("built" in found["versions"]["ops (_C)"]) and "_C" in found["versions"]["ops (_C)"]
    assert found["processor"]["instruction set of the kernels"] == ops.get_isa()
    assert str(os.cpu_count()) in found["processor"]["cores"]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    expected = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    assert found["memory"]["locked memory (ulimit -l)"].startswith(expected)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert float(found["memory"]["total"].removesuffix(" GiB")) == pytest.approx(pages, rel=0.01)
    free = float(found[f"folder {tmp_path}"]["free"].removesuffix(" GiB"))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1)
    assert list(tmp_path.iterdir()) == []


def test_table_shows_every_fact() -> None:
    output = run("env")
    for section, values in facts().items():
        assert section in output
        assert all(name in output for name in values)


def test_backends_come_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"io_uring": "forbidden by this container (errno 1)", "libaio": "", "threads": ""}
    monkeypatch.setattr(ops, "aio_backends", lambda: reasons)
    monkeypatch.setattr(ops, "cufile_unavailable_reason", lambda: "libcufile.so.0: no such file")
    assert facts()["asynchronous I/O"] == {
        "io_uring": "not available: forbidden by this container (errno 1)",
        "libaio": "available",
        "threads": "available",
        "GPUDirect Storage (cuFile)": "not available: libcufile.so.0: no such file",
    }


def test_a_machine_without_ops_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise RuntimeError("no C++ compiler was found\nmore lines")

    monkeypatch.setattr(environment, "load", no_compiler)
    monkeypatch.setattr(ops, "get_isa", no_compiler)
    monkeypatch.setattr(ops, "aio_backends", no_compiler)
    monkeypatch.setattr(environment, "NvmeStore", lambda paths: no_compiler())
    found = facts()
    assert found["versions"]["ops (_C)"] == "unknown: no C++ compiler was found"
    assert found["asynchronous I/O"] == {"backends": "unknown: no C++ compiler was found"}
    assert found["processor"]["instruction set of the kernels"].startswith("unknown")
    assert found["CUDA"]["kernels (_C_cuda)"] == "unknown: no C++ compiler was found"
    assert found["memory"]["total"].endswith("GiB")


def test_folders_in_memory_and_without_rights_say_so() -> None:
    assert "memory (tmpfs or ramfs)" in environment.direct_transfers(Path("/dev/shm"))
    assert environment.file_system(Path("/dev/shm")).startswith("tmpfs on ")
    assert environment.file_system(Path("/proc")).startswith("proc on ")
    assert environment.describe_environment(Path("/proc"))["folder /proc"]["O_DIRECT"].startswith("unknown: ")


def test_forbidden_peer_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.peer_memory().startswith(("yes", "no, ranks go through gloo: "))
    # Address 1 is never mapped, so the kernel refuses the read as it does where ptrace is forbidden.
    monkeypatch.setattr(environment, "_OWNER", "import sys; print(1, flush=True); sys.stdin.read()")
    assert environment.peer_memory().startswith("no, ranks go through gloo: ")


def test_numa_nodes_are_those_of_the_kernel() -> None:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    text = facts()["memory"]["NUMA nodes"]
    assert text.startswith(f"{len(nodes)}, processors of node0: " if nodes else "none")


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that says it has CUDA 13.0, a fake nvcc for it, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "cuda_sources", lambda root: ["csrc/cuda/flat/flat_buffer.cu"])
    fake_toolkit.install(tmp_path / "toolkit", monkeypatch)
    return tmp_path


def kernels() -> str:
    return facts()["CUDA"]["kernels (_C_cuda)"]


def test_kernels_are_built_or_would_be_or_cannot_be(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts()["CUDA"]
    assert found["torch"] == "built for CUDA 13.0"
    assert found["nvcc"] == f"13.0, {cuda}/toolkit/bin/nvcc"
    assert kernels().startswith("none yet: no GPU here uses them; `zero-ext build` compiles them; ")
    assert found["cache"] == f"{cuda}/cache/zero_ext, empty"
    monkeypatch.setattr(environment, "present_architectures", lambda: {(9, 0)})
    assert kernels().startswith("none yet: the first use compiles them; none came with this installation")
    module = jit_build.cached_kernels({(9, 0)})
    jit_build.obtain(module, lambda: jit_build.cuda_recipe(jit_build.source_root("_C_cuda"), {(9, 0)}))
    assert kernels().startswith(f"in the cache, {module.path}; ")
    folder, line = facts()["CUDA"]["cache"].splitlines()
    assert folder == f"{cuda}/cache/zero_ext" and line.startswith("_C_cuda-torch") and line.endswith(" MiB")
    module.path.write_bytes(b"damaged")
    assert facts()["CUDA"]["cache"].endswith("damaged: built again at its next use")
    monkeypatch.setenv("FAKE_NVCC_RELEASE", "12.8")
    assert kernels().startswith(
        "none, and they cannot be compiled: nvcc: expected the major version of CUDA "
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kernels() == f"none, because torch {torch.__version__} is built without CUDA"


def test_gpus_come_with_capability_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {0: ("NVIDIA H200", 9, 0, 150), 1: ("Tesla V100", 7, 0, 32)}
    properties = {
        number: SimpleNamespace(name=name, major=major, minor=minor, total_memory=size << 30)
        for number, (name, major, minor, size) in gpus.items()
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: gpus[torch.device(device).index][1:3]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpus[device.index][0])
    found = facts()["accelerators"]
    assert found["cuda:0"] == "NVIDIA H200, compute capability 9.0, 150.0 GiB"
    assert found["cuda:1"] == "Tesla V100, compute capability 7.0, too old for the CUDA kernels, 32.0 GiB"
    assert "torch.accelerator" in found


def test_cufile_is_found_where_wheels_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_cufile_paths", lambda: [tmp_path / "a", tmp_path / "b"])
    monkeypatch.setattr(environment, "_NVIDIA_FS", tmp_path)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert facts()["CUDA"]["GPUDirect Storage"] == "no: libcufile.so.0 was not found"
    (tmp_path / "b").touch()
    assert facts()["CUDA"]["GPUDirect Storage"] == f"{tmp_path / 'b'}; kernel module nvidia-fs loaded"
