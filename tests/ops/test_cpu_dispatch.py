"""The instruction set can be chosen, and wrong names are refused."""

from __future__ import annotations

import pytest
import torch

from tests.ops.helpers import available_isas
from zero_ext import ops
from zero_ext.ops.load_library import ISA_NAMES


def test_every_available_level_can_be_chosen() -> None:
    widest = ops.get_isa()
    for name in available_isas():
        before = ops.set_isa(name)
        try:
            assert ops.get_isa() == name
        finally:
            assert ops.set_isa(before) == name
    assert ops.get_isa() == widest


def test_one_family_is_available_besides_scalar() -> None:
    available = available_isas()
    x86 = list(ISA_NAMES[:-1])
    assert available == x86[: len(available)] or available == ["scalar", "neon"]
    for name in set(ISA_NAMES) - set(available):
        with pytest.raises(RuntimeError, match="level: expected one of 0"):
            ops.set_isa(name)
        assert ops.get_isa() == available[-1]


def test_unknown_names_and_levels_are_refused() -> None:
    before = ops.get_isa()
    with pytest.raises(ValueError, match=r"expected one of scalar, avx2, avx512.*, got 'sse9'"):
        ops.set_isa("sse9")
    for level in (-1, len(ISA_NAMES)):
        with pytest.raises(RuntimeError, match=f"level: expected .*got {level}"):
            torch.ops.zero_ext.set_cpu_dispatch_level(level)
    assert ops.get_isa() == before
