"""The instruction set that the CPU kernels use."""

from __future__ import annotations

import torch

from zero_ext.ops.load_library import fake_kernel, op

ISA_NAMES: tuple[str, ...] = ("scalar", "avx2", "avx512", "avx512_bf16")


def get_isa() -> str:
    """Name of the instruction set in use; the widest of this machine until :func:`set_isa`."""
    return ISA_NAMES[op("cpu_dispatch_level")()]


def set_isa(name: str) -> str:
    """Make all kernels of this process use one of :data:`ISA_NAMES`; return the one used before.

    Results are bit-identical at every level, but for those of attention, which add in another order and, with
    "avx512_bf16", multiply bfloat16 numbers in pairs. This exists for tests and measurements.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: this machine lacks the instruction set.
    """
    if name not in ISA_NAMES:
        raise ValueError(
            f"instruction set: expected one of {', '.join(ISA_NAMES)}, got {name!r}. Choose one of them."
        )
    before = get_isa()
    op("set_cpu_dispatch_level")(ISA_NAMES.index(name))
    return before


@fake_kernel("cpu_dispatch_level")
def _isa_level() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


@fake_kernel("set_cpu_dispatch_level")
def _set_isa_level(level: int) -> None:
    return None
