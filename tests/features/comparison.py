"""Runs a case of a feature on the CPU and on the strict stand-in, and compares what the ranks find."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.accelerator.stand_in import BACKEND
from tests.features.cases import Case
from tests.multi.worlds import Worlds


class BothDevices:
    """Ranks on the CPU over gloo, and ranks with the stand-in, whose own collectives are the only ones."""

    def __init__(self) -> None:
        self._worlds = {"cpu": Worlds(), "stand_in": Worlds(stand_in=True, backend=BACKEND)}

    def check(self, case: Case) -> None:
        """Asserts that every rank finds the same bits on both."""
        seed = random.getrandbits(31)
        print(f"seed {seed}")
        wanted, found = (
            worlds.run(case.ranks, case.body, {**case.arguments, "device": device}, seed)
            for device, worlds in self._worlds.items()
        )
        for rank, (found_state, wanted_state) in enumerate(zip(found, wanted, strict=True)):
            assert found_state.keys() == wanted_state.keys() and found_state, f"rank {rank}"
            for name, value in found_state.items():
                assert same(value, wanted_state[name]), (
                    f"rank {rank}, {name}: {value}; on the CPU {wanted_state[name]}"
                )

    def close(self) -> None:
        """Ends all ranks."""
        for worlds in self._worlds.values():
            worlds.close()


def same(found: Any, wanted: Any) -> bool:
    """Whether two values are, bit for bit."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    return bool(found == wanted)


@pytest.fixture(scope="module")
def both_devices() -> Iterator[BothDevices]:
    """Processes of a module of tests."""
    both = BothDevices()
    yield both
    both.close()
