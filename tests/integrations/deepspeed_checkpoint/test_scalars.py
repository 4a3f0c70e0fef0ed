"""What a checkpoint of DeepSpeed holds beside tensors, for tables of hostile length."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from zero_ext.integrations.deepspeed.checkpoint_scalars import _per_parameter


def test_parameters_without_elements_take_linear_time() -> None:
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
