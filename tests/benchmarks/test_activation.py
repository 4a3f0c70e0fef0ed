"""The benchmark of checkpoints: its bars, and one run of a tiny model."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.activation import BARS, WAYS, Run, measure, table_of
from benchmarks.harness.checkpointed import COMMANDS, TORCH, Checkpointed


def test_bars_are_on_the_ratio_to_torch_and_on_the_gradients() -> None:
    base = Run(TORCH, [2.0, 2.0, 2.0], True, {"kept": 0, "layers": 2})
    host = Run("host", [2.0 * BARS["host"]] * 3, True, {"kept": 4_000_000, "layers": 2})
    assert host.met(base) and base.met(base)
    assert "2.00" in table_of([base, host], "tiny", 64, 3, 1).rows[1]
    host.seconds = [2.2] * 3
    assert not host.met(base)
    host.seconds, host.same_bits = [2.0] * 3, False
    assert not host.met(base)


class InThisProcess:
    """Answers as a team of one would."""

    def __init__(self) -> None:
        self._rank = Checkpointed()

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        assert command in COMMANDS
        return [getattr(self._rank, command)(**arguments)]


def test_a_run_of_a_tiny_model() -> None:
    team, runs, threads = InThisProcess(), [Run(name) for name in WAYS], torch.get_num_threads()
    team.ask("start", shape="tiny", threads=1, tokens=32, ways=WAYS)
    measure(team, runs, rounds=1, repeats=1)  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    kept = {run.name: run.facts["kept"] for run in runs}
    assert all(run.same_bits and run.seconds[0] > 0 for run in runs)
    assert kept[TORCH] == kept["device"] == 0
    layers, nbytes = runs[0].facts["layers"], -(-runs[0].facts["input"] // 4096) * 4096
    assert {kept[name] for name in ("one buffer", "host", "NVMe")} == {layers * nbytes}
    team._rank.close()
