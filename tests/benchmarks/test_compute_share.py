"""The share of compute in a step: what the bound computes, its ranks, and the exit status."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import compute_share
from benchmarks.harness.duel import Record
from benchmarks.harness.shapes import SHAPES, batch_for, build_model
from benchmarks.harness.workload import Workload
from benchmarks.peers import CONTENDERS, trainer_class
from benchmarks.peers.base import loss_of
from benchmarks.runs import RUNS
from tests.benchmarks.conftest import Concluded


def test_the_bound_is_forward_and_backward_of_the_plain_model() -> None:
    shape, tokens = SHAPES["tiny"], batch_for(SHAPES["tiny"], 0, 0, 16)
    trainer: Any = trainer_class("compute")(shape)
    reference = build_model(shape)
    loss = loss_of(reference, tokens)
    loss.backward()
    for _ in range(2):  # it does not train, and gradients do not add up
        assert torch.equal(trainer.step(tokens), loss.detach())
        for mine, theirs in zip(trainer.model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    gradients = [each.grad for each in reference.parameters() if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert trainer.gradient_norm() == norm.item() > 0


def test_bound_and_step_have_equal_ranks_and_every_bar_has_a_run() -> None:
    sides = [CONTENDERS[key] for key in (compute_share.BOUND, compute_share.SUBJECT)]
    assert [(each.ranks, each.threads) for each in sides] == [(2, 1)] * 2
    measured = set()
    for run in RUNS:
        if run.module == "compute_share":
            options = dict(zip(run.arguments[::2], run.arguments[1::2], strict=True))
            models = options.get("--models", "34m,239m").split(",")
            measured |= {(model, int(options.get("--tokens", 128))) for model in models}
    assert measured == set(compute_share.BARS)


@pytest.mark.parametrize(
    ("model", "tokens", "seconds", "first_loss", "missed"),
    [
        ("34m", 128, 1.24, 2.0, []),
        ("34m", 128, 1.26, 2.0, ["34m, 128 tokens: share 0.794 (0.794–0.794), at least 0.8 expected"]),
        ("34m", 1024, 1.02, 2.0, []),
        ("34m", 1024, 1.04, 2.0, ["34m, 1024 tokens: share 0.962 (0.962–0.962), at least 0.97 expected"]),
        ("239m", 512, 1.06, 2.0, ["239m, 512 tokens: share 0.943 (0.943–0.943), at least 0.95 expected"]),
        ("tiny", 64, 9.00, 2.0, []),  # no bar
        ("34m", 128, 1.00, 2.1, ["34m, 128 tokens: first losses differ"]),
    ],
)
def test_shares_and_their_bars(
    model: str,
    tokens: int,
    seconds: float,
    first_loss: float,
    missed: list[str],
    concluded: Concluded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def run_in_turn(keys: Any, shape: str, *_: Any, workload: Workload) -> dict[str, Record]:
        asked.append((keys, shape, workload))
        # The bound's later losses are those of the first weights.
        bound, step = Record([1.0] * 3, [2.0, 2.0]), Record([seconds] * 3, [first_loss, 1.0])
        return {"compute": bound, "stage3": step}

    monkeypatch.setattr(compute_share, "run_in_turn", run_in_turn)
    data, status = concluded(compute_share.main, model, tokens, 3, 1, 1)
    assert asked == [(("compute", "stage3"), model, Workload(2, tokens))]
    assert data["missed"] == missed and status == int(bool(missed))
    (row,) = data["shares"]
    assert row["share"]["median"] == pytest.approx(1 / seconds)
