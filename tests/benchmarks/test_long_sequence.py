"""The benchmark of long sequences: the search by the parabola through two peaks, and tiny trials."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from benchmarks import long_quality, long_sequence
from benchmarks.harness import long_model, long_trial

GIGA = 10**9


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Trials that take what formulas say: 2 GB and n² of dense attention, or a line."""
    asked = []

    def attempt(kind: str, tokens: int, cap_bytes: int, *_: object) -> long_sequence.Trial:
        asked.append((kind, tokens))
        peak = 2 * GIGA + (150 * tokens**2 if kind == "math" else 100_000 * tokens)
        return long_sequence.Trial(kind, tokens, peak <= cap_bytes, peak)

    monkeypatch.setattr(long_sequence, "attempt", attempt)
    return asked


def test_what_fails_lies_just_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(quiet=True)
    asked = pretend(monkeypatch)
    limit = (8 * GIGA / 150) ** 0.5
    trials = long_sequence.shortest_failing(10 * GIGA, "bfloat16", console)
    assert [trial.trained for trial in trials] == [True, True, False]
    assert limit < trials[-1].tokens <= long_sequence.CLOSE * limit + 64
    for kind in ("sparse", "flash"):
        trials = long_sequence.tried(kind, 10 * GIGA, "bfloat16", console)
        assert [trial.tokens for trial in trials] == list(long_sequence.PROBES[kind])
    assert len(asked) == 7


def test_a_peak_that_grows_slower_than_foretold_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(kind: str, tokens: int, cap_bytes: int, *_: object) -> long_sequence.Trial:
        peak = 2 * GIGA + 150 * tokens**2 - max(0, tokens - 5000) ** 2 * 100
        return long_sequence.Trial(kind, tokens, peak <= cap_bytes, peak)

    monkeypatch.setattr(long_sequence, "attempt", attempt)
    trials = long_sequence.shortest_failing(10 * GIGA, "bfloat16", Console(quiet=True))
    assert trials[-2].trained and not trials[-1].trained
    assert trials[-2].tokens > 5000 and trials[-1].tokens <= 1.03 * trials[-2].tokens
    with pytest.raises(RuntimeError, match="raise --cap"):
        long_sequence.shortest_failing(GIGA, "bfloat16", Console(quiet=True))


@pytest.mark.parametrize("kind", ["math", "flash", "sparse"])
def test_a_tiny_trial(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("LAYERS", 1), ("HIDDEN", 64), ("HEADS", 4), ("FEED_FORWARD", 64)):
        monkeypatch.setattr(long_model, name, value)
    assert long_trial.main(kind, "128", "bfloat16") == 0
    facts = json.loads(capsys.readouterr().out)
    assert 9 < facts["loss"] < 12
    assert facts["peak_bytes"] > 10**8


def test_refused_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        torch.empty(1 << 50, device="cpu")

    monkeypatch.setattr(long_trial, "step", refuse)
    assert long_trial.main("sparse", "64", "bfloat16") == long_trial.OUT_OF_MEMORY


def test_an_error_about_a_memory_format_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unsupported memory_format option Preserve")

    monkeypatch.setattr(long_trial, "step", fail)
    with pytest.raises(RuntimeError, match="memory_format"):
        long_trial.main("sparse", "64", "bfloat16")


def test_quality_is_judged_on_documents_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training, held_out = long_quality.corpus()
    assert training.numel() > 5 * held_out.numel() > 50_000
    monkeypatch.setattr(long_quality, "corpus", lambda: (training, held_out))
    for name, size in (("hidden_size", 64), ("num_hidden_layers", 1)):
        monkeypatch.setitem(long_quality.SHAPE, name, size)
    run = long_quality.train("fixed", 0, 4, 128, Console(quiet=True))
    assert len(run.held_out) == 4
    assert run.held_out[-1] < run.held_out[0] < 6
