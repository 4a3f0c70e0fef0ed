"""The steps of the check in the order of their weight, on a GPU or as a rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zero_ext.gpu_check.step import Step, nothing_missing

# Modules that the programs import beside torch and the standard library.
NEEDED = ("numpy", "pydantic", "rich", "safetensors", "typer")
TOY = ("--device", "cpu", "--toy")
# Toy sizes gain nothing by threads, and lose much where the machine is busy; a GPU is not to take part.
REHEARSAL = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def needs_modules(*names: str) -> Callable[[], str]:
    """A reason naming those modules that cannot be imported."""

    def missing() -> str:
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        return f"Python cannot import {', '.join(absent)}" if absent else ""

    return missing


def needs_program(name: str) -> Callable[[], str]:
    """A reason if `name` is neither on PATH nor beside nvcc."""
    return lambda: "" if find_program(name) else f"{name} is not installed"


def find_program(name: str) -> str:
    """Path of a program of the CUDA toolkit, or nothing."""
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [f"{place}/bin" for place in places if place]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders)) or ""


def build_step() -> Step:
    """Both extension modules, in place."""
    return Step(
        "build",
        "compile _C and _C_cuda in place",
        (sys.executable, "setup.py", "build_ext", "--inplace"),
        limit=300,
        missing=needs_program("nvcc"),
    )


def test_step(device: str) -> Step:
    """The GPU tests; the device may be another one to rehearse them."""
    return Step(
        "tests",
        "kernels, equivalence of stages and tiers, graphs, NCCL, memory",
        (sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", "tests/gpu"),
        limit=150,
        missing=needs_modules("pytest", *NEEDED),
        after=("build",),
        environment={"ZERO_EXT_TEST_DEVICE": device},
    )


def sanitizer_step(tool: str) -> Step:
    """The kernels on small sizes under one tool of compute-sanitizer."""
    return Step(
        tool,
        f"the kernels under compute-sanitizer --tool {tool}",
        (
            find_program("compute-sanitizer") or "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "tests.gpu.exercise",
        ),
        limit=75,
        least=20,
        missing=needs_program("compute-sanitizer"),
        after=("build",),
        # Each tensor is then an allocation of its own, whose end the tool knows.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def benchmark_step(
    name: str, title: str, limit: float, least: float, program: str = "", options: tuple[str, ...] = ()
) -> Step:
    """`python -m benchmarks.gpu.<program>`, which by default is called `name`."""
    return Step(
        name,
        title,
        (sys.executable, "-m", f"benchmarks.gpu.{program or name}", *options),
        limit=limit,
        least=least,
        budgeted=True,
        missing=needs_modules(*NEEDED),
        after=("build",),
    )


def gpu_steps(memory: float = 0.0) -> list[Step]:
    """All steps on a machine with a GPU, the weightiest first. `memory`: GiB, 0 for what is free."""
    room = ("--memory", f"{memory:g}")
    return [
        build_step(),
        test_step("cuda"),
        benchmark_step("copies", "copy rates: on the device and to and from pinned memory", 20, 10),
        benchmark_step("adam", "fused Adam, the bf16 pipeline, 8-bit moments", 40, 15),
        benchmark_step("compression", "signs and blocks of integers against a copy", 30, 12),
        benchmark_step("attention", "block-sparse attention against dense flash and FlexAttention", 160, 40),
        sanitizer_step("memcheck"),
        benchmark_step("step", "a step of a 1.3B GPT, hooks, what the offload hides", 150, 40),
        benchmark_step("cap10", "the largest model under 10 GiB", 100, 30, "capped", ("--cap", "10", *room)),
        benchmark_step(
            "cap32",
            "13B and the largest model under 32 GiB",
            300,
            60,
            "capped",
            ("--cap", "32", "--first", "13b", *room),
        ),
        sanitizer_step("racecheck"),
    ]


def rehearsal_steps() -> list[Step]:
    """The same programs on the CPU at toy sizes, with what is built already."""
    exercise = (sys.executable, "-m", "tests.gpu.exercise", "--device", "cpu")
    kernels = replace(
        sanitizer_step("memcheck"), title="the kernels once", command=exercise, missing=nothing_missing
    )
    benchmarks = [replace(step, command=(*step.command, *TOY)) for step in gpu_steps() if step.budgeted]
    steps = [test_step("cpu"), kernels, *benchmarks]
    return [replace(step, environment={**step.environment, **REHEARSAL}) for step in steps]


def chosen(steps: Sequence[Step], only: str) -> list[Step]:
    """The steps named in `only`, separated by commas; all without it.

    Raises:
        ValueError: a name belongs to no step.
    """
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        known = ", ".join(step.name for step in steps)
        raise ValueError(f"--only names {', '.join(sorted(unknown))}; the steps are {known}")
    return [step for step in steps if not names or step.name in names]


def is_source_tree(folder: Path) -> bool:
    """Whether the programs of the steps are there."""
    return all((folder / name).is_dir() for name in ("csrc/cuda", "tests/gpu", "benchmarks/gpu"))
