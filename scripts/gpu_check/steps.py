"""The steps of the check, those that teach most first, on a GPU or as a rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.gpu_check.step import Step

# What zero_ext imports beside torch and the standard library; `make gpu-wheels` fetches what a machine lacks.
NEEDED = ("numpy", "pydantic", "rich", "safetensors", "typer")
TOY = ("--device", "cpu", "--toy")
# Toy sizes gain nothing by threads, and lose much where the machine is busy; a GPU is not to take part.
REHEARSAL = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# The families of kernels that tests.gpu.exercise knows; each is a process, so a crash costs one of them.
FAMILIES = ("adam", "lion", "lamb", "eight_bit", "flat", "onebit", "integers", "attention")
# Files of tests/gpu: kernels first, then the engine, from what everything rests on to what few use.
TESTS = (
    *(
        "adam",
        "flat",
        "non_finite",
        "attention",
        "compression",
        "eight_bit",
        "lamb_and_lion",
        "device_errors",
    ),
    *("equivalence", "groups", "memory", "graphs", "compile", "llama", "gpu_direct_storage"),
)
SUITES = ("correctness", "speed")


def needs_modules(*names: str) -> Callable[[], str]:
    """A reason naming those modules that cannot be imported."""

    def is_absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            return True

    def missing() -> str:
        absent = [name for name in names if is_absent(name)]
        return f"Python cannot import {', '.join(absent)}" if absent else ""

    return missing


def needs_program(name: str) -> Callable[[], str]:
    """A reason if `name` is neither on PATH nor beside nvcc."""
    return lambda: "" if find_program(name) else f"{name} is not installed"


def all_of(*reasons: Callable[[], str]) -> Callable[[], str]:
    """The first reason that is one."""
    return lambda: next(filter(None, (reason() for reason in reasons)), "")


def find_program(name: str) -> str:
    """Path of a program of the CUDA toolkit, or nothing."""
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [f"{root}/bin" for root in roots if root]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders)) or ""


def build_step(keep: Path | None = None) -> Step:
    """Both extension modules for the GPUs that are present, unless built ones fit; copies go to `keep`."""
    copies = () if keep is None else ("--keep", str(keep))
    return Step(
        "build",
        "compile _C and _C_cuda for this GPU, or take those that were carried here",
        (sys.executable, "-m", "scripts.gpu_check.build", *copies),
        limit=330,
        least=30,
        missing=all_of(needs_program("nvcc"), needs_modules("setuptools", "ninja")),
        alone=True,
    )


def exercise_step(family: str) -> Step:
    """One family of kernels against the CPU's, on small and odd sizes."""
    return Step(
        f"kernels-{family}",
        f"kernels of {family} against the CPU's",
        (sys.executable, "-m", "tests.gpu.exercise", "--family", family),
        limit=60,
        missing=needs_modules(*NEEDED),
        after=("build",),
    )


def sanitizer_step(tool: str, family: str) -> Step:
    """The same under one tool of compute-sanitizer."""
    plain = exercise_step(family)
    sanitizer = (find_program("compute-sanitizer") or "compute-sanitizer", "--tool", tool)
    return replace(
        plain,
        name=f"{tool}-{family}",
        title=f"kernels of {family} under compute-sanitizer --tool {tool}",
        command=(*sanitizer, "--error-exitcode", "9", *plain.command),
        limit=75,
        least=15,
        missing=all_of(needs_program("compute-sanitizer"), plain.missing),
        # Each tensor is then an allocation of its own, whose end the tool knows.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def test_step(name: str, device: str) -> Step:
    """One file of tests/gpu; the device may be another one to rehearse it."""
    file = f"tests/gpu/test_{name}.py"
    return Step(
        f"test_{name}",
        file,
        (sys.executable, "-m", "pytest", "-q", "--maxfail=10", "-p", "no:cacheprovider", file),
        limit=120,
        least=10,
        missing=needs_modules("pytest", "hypothesis", *NEEDED),
        after=("build",),
        environment={"ZERO_EXT_TEST_DEVICE": device},
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
        alone=True,
    )


def counters_step() -> Step:
    """Kernels of every family at full size under Nsight Compute."""
    return Step(
        "counters",
        "what ncu counts of a kernel of each family: time, share of the peak rates, registers",
        (sys.executable, "-m", "scripts.gpu_check.counters"),
        limit=90,
        least=25,
        missing=all_of(needs_program("ncu"), needs_modules(*NEEDED)),
        after=("build",),
        alone=True,
    )


def correctness_steps(device: str) -> list[Step]:
    """Is it right: kernels, then the engine over them, then what the sanitizer sees."""
    return [
        *map(exercise_step, FAMILIES),
        *(test_step(name, device) for name in TESTS),
        *(sanitizer_step("memcheck", family) for family in FAMILIES),
        *(sanitizer_step("racecheck", family) for family in FAMILIES),
        *(sanitizer_step("synccheck", family) for family in FAMILIES),
        *(sanitizer_step("initcheck", family) for family in FAMILIES),
    ]


def speed_steps(memory: float = 0.0) -> list[Step]:
    """How fast is it. `memory`: GiB of the host's for large models, 0 for what is free."""
    memory_option = ("--memory", f"{memory:g}")
    first = ("--cap", "32", "--first", "13b", *memory_option)
    return [
        benchmark_step("copies", "copy rates: on the device and to and from pinned memory", 20, 10),
        benchmark_step("adam", "fused Adam, the bf16 pipeline, 8-bit moments", 40, 15),
        benchmark_step("compression", "1-bit and integer blocks against a copy", 30, 12),
        benchmark_step("attention", "block-sparse attention against dense flash and FlexAttention", 160, 40),
        counters_step(),
        benchmark_step("step", "a step of a 1.3B GPT, hooks, what the offload hides", 150, 40),
        benchmark_step(
            "cap10", "the largest model under 10 GiB", 100, 30, "capped", ("--cap", "10", *memory_option)
        ),
        benchmark_step("cap32", "13B and the largest model under 32 GiB", 300, 60, "capped", first),
    ]


def gpu_steps(suite: str = "", memory: float = 0.0, keep: Path | None = None) -> list[Step]:
    """The steps of a suite on a machine with a GPU, or of both. The build saves its modules in `keep`."""
    by_suite = {"correctness": correctness_steps("cuda"), "speed": speed_steps(memory)}
    wanted = [by_suite[suite]] if suite else by_suite.values()
    return [build_step(keep), *(step for steps in wanted for step in steps)]


def rehearsal_steps(suite: str = "") -> list[Step]:
    """The same programs on the CPU at toy sizes, with what is built already and without the GPU's tools."""
    on_cpu = [
        *(replace(step, command=(*step.command, "--device", "cpu")) for step in map(exercise_step, FAMILIES)),
        *(test_step(name, "cpu") for name in TESTS),
    ]
    toys = [replace(step, command=(*step.command, *TOY)) for step in speed_steps() if step.budgeted]
    wanted = {"correctness": on_cpu, "speed": toys, "": [*on_cpu, *toys]}[suite]
    return [replace(step, environment={**step.environment, **REHEARSAL}) for step in wanted]


def chosen(steps: Sequence[Step], only: str) -> list[Step]:
    """The steps named in `only`, separated by commas; all without it.

    Raises:
        ValueError: a name belongs to no step.
    """
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {step.name for step in steps}
    if unknown:
        known = ", ".join(step.name for step in steps)
        raise ValueError(
            f"--only: expected steps of this suite, got {', '.join(sorted(unknown))}. Use {known}."
        )
    return [step for step in steps if not names or step.name in names]


def is_source_tree(folder: Path) -> bool:
    """Whether the programs of the steps are there."""
    return all((folder / name).is_dir() for name in ("csrc/cuda", "tests/gpu", "benchmarks/gpu"))
