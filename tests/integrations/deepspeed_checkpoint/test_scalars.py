"""What a checkpoint of DeepSpeed holds beside tensors, for tables of hostile length."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import ModelFile
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import _per_parameter


def test_parameters_without_elements_need_linear_time() -> None:
    many = 40_000
    checkpoint: Any = SimpleNamespace(
        first=SimpleNamespace(
            groups=[{}] * many,
            flat_groups=list(range(many)),
            scalars=[{"step": number} for number in range(many)],
            moments=[{"exp_avg": None, "exp_avg_sq": None}] * many,
            path="optim_states.pt",
        ),
        trained=lambda: [(f"p{number}", SimpleNamespace(fragments=()), number) for number in range(many)],
    )
    start = time.process_time()
    found = _per_parameter(checkpoint, "Adam")
    assert time.process_time() - start < 1.5
    assert found == {"step": {f"p{number}": number for number in range(many)}}


def test_the_first_of_many_wrong_entries_is_named(tmp_path: Path) -> None:
    many, valid = 100_000, {"module": {}, "param_shapes": [], "buffer_names": []}
    steps = {"global_steps": 1, "skipped_steps": 0}
    for wrong in (
        {"buffer_names": [1] * many},
        {"param_shapes": [{str(number): None for number in range(many)}]},
        {"shared_params": dict.fromkeys(map(str, range(many)), 1)},
        {"module": dict.fromkeys(range(many))},
    ):
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=f"{next(iter(wrong))}: .*expected a"):
            ModelFile.of({**valid, **steps, **wrong}, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
