"""A rank that dies in the middle of a pipeline's step: the others are told, long before their time-out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.parallel.pipeline import dying

RANKS, DEAD = 4, 1


def test_every_other_rank_raises(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(dying.__file__))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, text) in enumerate(zip(ranks, said, strict=True)):
        assert process.returncode == (17 if rank == DEAD else 3), text
        if rank != DEAD:
            found = re.search(
                r"raised after ([\d.]+) s: pipeline rank (\d) \(stages \[(\d)\] of 4\): it stopped", text
            )
            assert found is not None, text
            assert float(found[1]) < 20 and found[2] == found[3] == str(rank)
