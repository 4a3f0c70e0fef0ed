"""Every feature on the stand-in accelerator, with its strict collectives as the only ones of the world: what
a rank finds is what it finds on the CPU over gloo."""

from __future__ import annotations

import pytest

from tests.features.cases import CASES, Case
from tests.features.comparison import BothDevices, both_devices

__all__ = ["both_devices"]


@pytest.mark.by_turns()
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.needs_transformers], ids=lambda case: case.name
)
def test_the_stand_in_finds_what_the_cpu_finds(case: Case, both_devices: BothDevices) -> None:
    both_devices.check(case)
