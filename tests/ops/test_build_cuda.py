"""``_C_cuda`` built just in time, by an nvcc that only pretends: who builds, when, what is said if not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.ops import fake_toolkit
from tests.ops.forked import Builder
from zero_ext.ops import load_library
from zero_ext.ops.jit import jit_build, toolchain
from zero_ext.ops.jit.build_cache import cached_modules

HOPPER = {(9, 0)}
SOURCES = ["csrc/cuda/flat/flat_buffer.cu", "csrc/cuda/cuda_module.cpp"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return tmp_path / "zero_ext"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake toolkit's note of compilations; two sources, so that a build takes half a second."""
    monkeypatch.setattr(
        toolchain, "cuda_sources", lambda root: ["csrc/cuda/flat/flat_buffer.cu", "csrc/cuda/cuda_module.cpp"]
    )
    return fake_toolkit.install(tmp_path / "toolkit", monkeypatch)


def start_build(folder: Path) -> Builder:
    """Another process that builds and loads the CUDA kernels."""
    return Builder(folder, lambda: jit_build.build_kernels(HOPPER))


def obtain(wanted: set[tuple[int, int]] = HOPPER) -> Path:
    """Builds in this process without importing, which would stay for the other tests."""
    module = jit_build.cached_kernels(wanted)
    jit_build.obtain(module, lambda: jit_build.cuda_recipe(jit_build.source_root("_C_cuda"), wanted))
    return module.path


def test_ranks_that_start_simultaneously_build_once_and_load_it(
    calls: Path, cache: Path, tmp_path: Path
) -> None:
    builders = [start_build(tmp_path) for _ in range(3)]
    ends = [builder.end() for builder in builders]
    assert [status for status, _ in ends] == [0, 0, 0], ends
    ((name, path),) = {builder.loaded() for builder in builders}
    assert name == "zero_ext._C_cuda" and path.is_relative_to(cache)
    assert path.parent.name == "sm_90"
    compiled, linked = calls.read_text().splitlines()
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in compiled and "flat_buffer.cu" in compiled
    assert "-DUSE_CUDA=1" in compiled and "--fmad=false" in compiled
    assert (
        "--cudart=none" in linked and linked.count("/lib/libcudart.so.13 ") == 1 and "-ltorch_cuda" in linked
    )
    assert "-c csrc/cuda/cuda_module.cpp" in (path.parent / "build.log").read_text()


def test_a_killed_builder_blocks_nobody(
    calls: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC_WAITS", "5")
    builder = start_build(tmp_path)
    builder.wait_for(calls)
    (leftover,) = cache.glob("*/*/building-*")
    builder.kill()
    monkeypatch.delenv("FAKE_NVCC_WAITS")
    assert obtain().is_file()
    assert not leftover.exists()


def test_who_waits_for_a_build_that_fails_fails_with_it(
    calls: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC_WAITS", "1")
    monkeypatch.setenv("FAKE_NVCC_FAILS", "flat_buffer.cu(7): error: no such kernel")
    first = start_build(tmp_path)
    first.wait_for(calls)
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"flat_buffer\.cu: .*failed with status 2. Read the last of its 101 lines"
    ) as caught:
        obtain()
    status, errors = first.end()
    assert status == 1 and str(caught.value) in errors
    assert "error: no such kernel" in str(caught.value) and "line 100\n" in str(caught.value)
    assert "line 50\n" not in str(caught.value)
    (log,) = cache.glob("*/*/build.log")
    assert f"See the full log: {log}" in str(caught.value) and "line 50\n" in log.read_text()
    # It did not compile again, and the next one, which did not wait, does.
    assert len(calls.read_text().splitlines()) == 1 and time.monotonic() - started < 60
    monkeypatch.delenv("FAKE_NVCC_WAITS")
    monkeypatch.delenv("FAKE_NVCC_FAILS")
    assert obtain().is_file()


@pytest.mark.parametrize("damage", ["truncated", "no module"])
def test_a_cached_module_that_does_not_load_is_built_again_once(
    calls: Path, tmp_path: Path, damage: str
) -> None:
    path = obtain()
    content = path.read_bytes()
    if damage == "truncated":
        # Loading it would end the process with SIGBUS, so the checksum must notice.
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_text("no module")
        jit_build.cached_kernels(HOPPER).put(_copy(path))
    builder = start_build(tmp_path)
    status, errors = builder.end()
    assert status == 0, errors
    assert path.read_bytes() == content and builder.loaded() == ("zero_ext._C_cuda", path)
    assert ("does not load and is built again" in errors) == (damage == "no module")


def _copy(path: Path) -> Path:
    copy = path.with_name("copy.so")
    copy.write_bytes(path.read_bytes())
    return copy


def test_a_new_module_that_does_not_load_either_is_an_error(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cuda_sources", lambda root: ["csrc/cuda/flat/flat_buffer.cu"])
    with pytest.raises(
        RuntimeError, match=r"_C_cuda\.abi3\.so: it was just built and does not load: .*PyInit__C_cuda"
    ):
        jit_build.build_kernels(HOPPER)
    assert len(calls.read_text().splitlines()) == 4


def test_a_build_for_more_gpus_is_used_without_any_compiler(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = obtain({(8, 0), (9, 0)})
    assert path.parent.name == "sm_80+sm_90"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "")
    assert obtain({(9, 0)}) == obtain({(8, 6)}) == obtain({(8, 0), (9, 0)}) == path
    with pytest.raises(RuntimeError, match="no nvcc was found"):
        obtain({(10, 0)})
    assert [module.path for module in cached_modules()] == [path]


def test_a_gpu_newer_than_nvcc_gets_the_newest_code_it_can_translate(calls: Path) -> None:
    assert obtain({(12, 1)}).parent.name == "sm_121"
    assert "-gencode=arch=compute_100,code=[sm_100,compute_100]" in calls.read_text()
    assert toolchain.runs_on({(8, 0)}, {(8, 9)}) and not toolchain.runs_on({(8, 0)}, {(9, 0)})
    assert not toolchain.runs_on({(8, 9)}, {(8, 6)}) and not toolchain.runs_on(set(), {(8, 0)})


def test_missing_and_unfitting_nvcc_are_named_with_both_versions(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC_RELEASE", "12.8")
    found = tmp_path / "toolkit" / "bin" / "nvcc"
    with pytest.raises(RuntimeError) as caught:
        obtain()
    for fragment in (
        "CUDA 13.0",
        f"{found} of CUDA 12.8",
        "nvcc: expected the major version of CUDA",
        "cuda-nvcc-13-0",
    ):
        assert fragment in str(caught.value)
    monkeypatch.setenv("FAKE_NVCC_RELEASE", "13.2")
    assert toolchain.find_nvcc("13.0", "2.13.0") == toolchain.Nvcc(found, "13.2")
    found.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(RuntimeError, match="which does not say its version"):
        obtain()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"no nvcc was found \(looked in \$CUDA_HOME, {tmp_path}/bin\)"):
        obtain()
    assert calls.read_text() == ""


def test_an_nvcc_on_path_that_does_not_fit_does_not_hide_one_that_does(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fitting = tmp_path / "old" / "nvcc", tmp_path / "toolkit" / "bin" / "nvcc"
    monkeypatch.setattr(toolchain, "_candidates", lambda cuda: iter([old, fitting]))
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho release 12.4\n")
    old.chmod(0o755)
    assert toolchain.find_nvcc("13.0", "2.13.0").path == fitting


def test_a_toolkit_without_its_run_time_is_refused_before_anything_is_compiled(
    calls: Path, tmp_path: Path
) -> None:
    (tmp_path / "toolkit" / "lib" / "libcudart.so.13").unlink()
    with pytest.raises(RuntimeError, match=r"has no libcudart\.so\.13. Install .* cuda-cudart-13-0"):
        obtain()
    assert calls.read_text() == ""


def test_the_host_compiler_is_checked_first(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVCC_REFUSES", "unsupported GNU version! gcc versions later than 15")
    pattern = r"nvcc 13\.0 .*: it does not work with the host compiler .*unsupported GNU version.* Set CXX to"
    with pytest.raises(RuntimeError, match=pattern):
        obtain()
    assert calls.read_text() == ""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(toolchain, "_release", lambda path: "13.0")
    with pytest.raises(RuntimeError, match=r"_C_cuda: it is not built, and no C\+\+ compiler was found"):
        obtain()


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        RuntimeError,
        match=r"zero_ext\._C_cuda: expected a torch with CUDA.*, got torch .* is built without CUDA",
    ):
        obtain()


# --- First use --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, int]]]:
    """A GPU of compute capability 9.0 that exists in torch's answers alone; the builds that are asked for."""
    builds: list[set[tuple[int, int]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test GPU")
    monkeypatch.setattr(jit_build, "build_kernels", builds.append)
    monkeypatch.setattr(load_library, "kernels_are_loaded", lambda: bool(builds))
    load_library.op.cache_clear()
    return builds


@pytest.fixture(autouse=True)
def fresh_ops() -> None:
    yield
    load_library.op.cache_clear()


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True
    device = torch.device("cuda:0")


def test_the_first_cuda_tensor_loads_the_kernels_once(gpu: list[set[tuple[int, int]]]) -> None:
    calls = []
    overload = lambda *arguments: calls.append(arguments)  # noqa: E731
    on_cpu, on_cuda = torch.zeros(2), torch.zeros(2).as_subclass(OnCuda)
    load_library._call_with_kernels(overload, on_cpu, [on_cpu], 1.0, None)
    assert gpu == [] and len(calls) == 1
    load_library._call_with_kernels(overload, on_cpu, [on_cpu, on_cuda], 1.0)
    load_library._call_with_kernels(overload, on_cuda)
    assert gpu == [HOPPER] and len(calls) == 3


def test_ops_watch_their_arguments_only_until_then(gpu: list[set[tuple[int, int]]]) -> None:
    watching = load_library.op("squared_norm_")
    assert watching is not torch.ops.zero_ext.squared_norm_.default
    accumulator = torch.zeros(33, dtype=torch.int64)
    watching(torch.ones(3), accumulator)
    assert accumulator.sum() != 0 and gpu == []
    load_library.load_kernels(torch.device("cuda", 0))
    assert gpu == [HOPPER]
    assert load_library.op("squared_norm_") is torch.ops.zero_ext.squared_norm_.default


def test_without_a_gpu_nothing_is_compiled(
    gpu: list[set[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = []
    load_library._call_with_kernels(
        lambda *arguments: calls.append(arguments), torch.zeros(1).as_subclass(OnCuda)
    )
    assert len(calls) == 1
    load_library.load_kernels(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"device cuda:1: expected a CUDA GPU, but .*built for CUDA 13\.0"):
        load_library.load_kernels(torch.device("cuda:1"))
    assert gpu == [] and load_library.present_architectures() == set()


def test_an_old_gpu_is_refused_by_name(
    gpu: list[set[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    pattern = r"cuda:0 \(NVIDIA Test GPU\): expected compute capability 8\.0 or higher .*, got 7\.5"
    with pytest.raises(RuntimeError, match=pattern):
        load_library.load_kernels(torch.device("cuda:0"))
    assert gpu == []
