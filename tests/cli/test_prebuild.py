"""``zero-ext build``: what it builds, for which GPUs, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.cli.command import run, run_json
from tests.ops.torch_2_11 import hide_swap
from zero_ext.cli import environment
from zero_ext.ops.host_memory import torch_swaps_storages
from zero_ext.ops.jit import jit_build as just_in_time
from zero_ext.ops.load_library import load


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, int]]]:
    """The GPUs that kernels are built for, on a torch with CUDA."""
    asked: list[set[tuple[int, int]]] = []

    def build(wanted: set[tuple[int, int]]) -> SimpleNamespace:
        asked.append(set(wanted))
        return SimpleNamespace(__file__="/cache/_C_cuda.abi3.so")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "build_kernels", build)
    return asked


def test_requested_architectures_come_before_local_and_wheel_ones(
    builds: list[set[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run("build")
    assert f"zero_ext._C: {load().__file__}\nzero_ext._C_cuda: /cache/_C_cuda.abi3.so\n" in output
    monkeypatch.setattr(environment, "present_architectures", lambda: {(8, 6)})
    run("build")
    run("build", "--cuda-architectures", "90, 10.0")
    assert builds == [{(8, 0), (9, 0)}, {(8, 6)}, {(9, 0), (10, 0)}]


def test_the_swap_of_storages_is_built_where_torch_has_none(
    builds: list[set[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ("_C_storage" in run("build")) != torch_swaps_storages() and "swap of storages" in run("env")
    hide_swap(monkeypatch)
    assert f"zero_ext._C_storage: {just_in_time.cached_storage_swap().path}\n" in run("build")
    assert run_json("env", "--json")["versions"]["swap of storages"].startswith("in the cache, ")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    found = run_json("env", "--json")["versions"]["swap of storages"]
    assert found == "none yet: the first model that gathers parameters compiles _C_storage"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = run_json("env", "--json")["versions"]["swap of storages"]
    assert found.startswith("unknown: zero_ext._C_storage: it is not built, and no C++ compiler")


@pytest.mark.parametrize("text", ["7.5", "8.0,", "sm_90", "", "9.0a"])
def test_what_is_no_compute_capability_from_8_on_is_refused(
    builds: list[set[tuple[int, int]]], text: str
) -> None:
    assert "compute capabilities: expected 8.0 or higher" in run(
        "build", "--cuda-architectures", text, status=2
    )
    assert builds == []


def test_built_kernels_stay_as_they_are(
    builds: list[set[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "kernels_are_loaded", lambda: True)
    loaded = {environment.CUDA_MODULE: SimpleNamespace(__file__="/site/_C_cuda.abi3.so")}
    monkeypatch.setattr(environment, "sys", SimpleNamespace(modules=loaded))
    assert "zero_ext._C_cuda: /site/_C_cuda.abi3.so" in run("build")
    assert "got one with /site/_C_cuda.abi3.so. Leave the option out" in run(
        "build", "--cuda-architectures", "9.0", status=2
    )
    assert builds == []


def test_a_torch_without_cuda_needs_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"zero_ext._C_cuda: none, because torch {torch.__version__} is built without CUDA" in run("build")
    assert "is built without CUDA" in run("build", "--cuda-architectures", "9.0", status=1)
    assert list(tmp_path.iterdir()) == [] or not list(tmp_path.glob("**/*.so"))
