"""DeepSpeed's CPU operators are compiled at first use; here, before anything is timed."""

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from rich.console import Console

from benchmarks.peers.contenders import contender_named
from benchmarks.peers.tuned_settings import PACKAGES


def compile_for(keys: Iterable[str], console: Console) -> None:
    """Build DeepSpeed's operators if one of these contenders needs them. RuntimeError when a build fails."""
    if any(PACKAGES.get(contender_named(key).family) == "deepspeed" for key in keys):
        with console.status("compiling DeepSpeed's operators (minutes the first time)"):
            compile_operators()


@cache
def compile_operators() -> None:
    """Build DeepSpeed's just-in-time CPU operators in a child process (minutes the first time, then cached).

    RuntimeError with the compiler's words when a build fails.
    """
    script = (
        "from deepspeed.ops.op_builder import AsyncIOBuilder\n"
        "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder\n"
        "FusedAdamBuilder().load(verbose=False); ShareMemCommBuilder().load(verbose=False)\n"
        "CPUAdamBuilder().load(verbose=False)\n"
        "if AsyncIOBuilder().is_compatible(verbose=False): AsyncIOBuilder().load(verbose=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            "DeepSpeed's CPU operators do not build; a C++ compiler and ninja on PATH are needed:\n"
            + done.stderr[-2000:]
        )


def load_async_io() -> Any:
    """DeepSpeed's libaio extension, compiled at first use (minutes).

    RuntimeError that says why it cannot be had: DeepSpeed or libaio is missing, or the compiler's words.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"needs deepspeed, a C++ compiler, ninja on PATH and libaio-dev: {str(error)[-500:]}"
        ) from error
