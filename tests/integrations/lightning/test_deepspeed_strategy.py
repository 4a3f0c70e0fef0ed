"""A script of Lightning's DeepSpeedStrategy under the installed DeepSpeed and under the look-alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launch import REAL, RUN, found_in, started

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_strategy.py"


def found_under(wanted: str, folder: Path) -> dict[str, Any]:
    """What the script found on two ranks; ``wanted`` says which DeepSpeed it was to import."""
    folder.mkdir()
    under = [REAL] if wanted == "real" else ["--deepspeed-compat"]
    started([*RUN, *under, SCRIPT, folder])
    found = found_in(folder)
    path = "site-packages/deepspeed/" if wanted == "real" else "zero_ext/integrations/deepspeed/"
    assert path in found.pop("file")
    return found


def test_fit_test_fit_and_fabric_are_those_of_deepspeed(tmp_path: Path) -> None:
    real, ours = (found_under(name, tmp_path / name) for name in ("real", "ours"))
    assert ours.keys() == real.keys() == {"trainer-2", "trainer-3", "fabric-2", "fabric-3"}
    for case, theirs in real.items():
        assert ours[case].keys() == theirs.keys()
        for key, values in theirs.items():
            assert ours[case][key] == pytest.approx(values, rel=1e-5), (case, key)
