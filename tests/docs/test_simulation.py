"""The code of docs/explanation/simulation.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zero_ext.plan.simulation import MACHINES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "simulation.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["step"].fits
    assert names["best"].world_size == 16


def test_every_machine_is_described() -> None:
    assert all(name in PAGE.read_text() for name in MACHINES)
