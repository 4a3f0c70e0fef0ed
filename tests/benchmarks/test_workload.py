"""Ranks, tokens and accumulation of a run: which contenders and bars it has, and that all train alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks import step
from benchmarks.harness import duel
from benchmarks.harness.duel import Record
from benchmarks.harness.matches import (
    LONG_STEP_BARS,
    STEP_MATCHES,
    expected_bytes,
    select,
    split_to_fit,
    step_matches,
)
from benchmarks.harness.ranks import TeamFailure
from benchmarks.harness.shapes import SHAPES, batch_for, build_model
from benchmarks.harness.worker import Rank
from benchmarks.harness.workload import ACCUMULATING, DEFAULT_WORKLOAD, Workload
from benchmarks.peers import CONTENDERS, trainer_class
from benchmarks.peers.base import loss_of
from benchmarks.runs import RUNS
from tests.benchmarks.conftest import Concluded

TINY = SHAPES["tiny"]
STEPS = 3


@pytest.mark.parametrize(("ranks", "threads"), [(1, 2), (2, 1), (4, 1)])
def test_a_run_chooses_the_ranks_of_its_contenders(ranks: int, threads: int) -> None:
    for key in ("stage3", "stage3-gloo", "ddp", "fsdp2", "deepspeed3"):
        applied = Workload(ranks).applied_to(CONTENDERS[key])
        assert (applied.ranks, applied.threads, applied.options) == (ranks, threads, CONTENDERS[key].options)
    assert Workload(ranks).applied_to(CONTENDERS["plain@1"]) == CONTENDERS["plain@1"]
    assert DEFAULT_WORKLOAD.applied_to(CONTENDERS["stage3"]) == CONTENDERS["stage3"]


def test_accumulation_is_configured_where_a_library_needs_it() -> None:
    four = Workload(accumulation=4)
    for key, options in (("ddp", {}), ("fsdp2", {}), ("stage2", {"accumulation": 4})):
        assert four.applied_to(CONTENDERS[key]).options == {**CONTENDERS[key].options, **options}
    assert four.applied_to(CONTENDERS["deepspeed1"]).options == {"stage": 1, "accumulation": 4}
    with pytest.raises(ValueError, match=f"{', '.join(ACCUMULATING)}, got 'trainer3'"):
        four.applied_to(CONTENDERS["trainer3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "ranks: .* got 0"), ((2, 4096), "2 to 2048, got 4096"), ((2, 128, 0), "accumulation: .* got 0")],
)
def test_impossible_workloads_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(*arguments)


def bars_of(model: str, workload: Workload) -> dict[tuple[str, str], float | None]:
    found = step_matches(model, workload)
    return {(match.subject, peer): bar for match in found for peer, bar in match.bars}


SHORT = {
    ("stage3", "fsdp2"): 0.50,
    ("stage3", "deepspeed3"): 0.50,
    ("stage3-gloo", "fsdp2"): 0.70,
    ("stage3-gloo", "deepspeed3"): 0.70,
    ("stage2", "fsdp2-keep"): 0.60,
    ("stage2", "deepspeed2"): 0.60,
    ("stage1", "ddp"): 0.85,
}
LONG = {
    ("stage3", "fsdp2"): 0.80,
    ("stage3", "deepspeed3"): 0.80,
    ("stage3-gloo", "fsdp2"): 0.90,
    ("stage3-gloo", "deepspeed3"): 0.90,
}
ALONE = {(f"stage{stage}@1", "plain@1"): 1.02 for stage in (1, 2, 3)}


@pytest.mark.parametrize(
    ("model", "workload", "expected"),
    [
        ("34m", DEFAULT_WORKLOAD, SHORT | ALONE),
        ("239m", Workload(2), SHORT),
        ("34m", Workload(2, 1024), LONG),
        ("239m", Workload(2, 1024), {}),
        ("34m", Workload(2, 128, 4), {}),
        ("34m", Workload(4), {}),
        ("34m", Workload(1, 1024, 4), ALONE),
    ],
)
def test_bars_are_those_of_the_workload(
    model: str, workload: Workload, expected: dict[tuple[str, str], float]
) -> None:
    found = bars_of(model, workload)
    assert {pair: bar for pair, bar in found.items() if bar is not None} == expected
    assert any(subject.endswith("-gloo") for subject, _ in found) == (workload.ranks != 1)
    assert {"stage0", "stage1", "stage2", "stage3"} <= {subject for subject, _ in found}


def test_every_workload_is_registered() -> None:
    runs = {run.name for run in RUNS if run.module == "step"}
    sizes = [(ranks, tokens, steps) for ranks in (1, 2, 4) for tokens in (128, 1024) for steps in (1, 4)]
    for ranks, tokens, steps in sizes:
        name = f"step/34m-ranks-{ranks}-tokens-{tokens}-accumulation-{steps}"
        assert (name in runs) == ((ranks, tokens, steps) != (2, 128, 1))
    assert {"step-34m", "step-239m", "step/239m-ranks-2-tokens-1024-accumulation-1"} <= runs
    assert set(LONG_STEP_BARS) == {("34m", 1024)}


def test_more_tokens_and_micro_batches_need_more_memory() -> None:
    keys = ("stage1", "ddp")
    sizes = [expected_bytes(keys, SHAPES["239m"], each) for each in (Workload(2), Workload(2, 1024))]
    assert sizes[0] == expected_bytes(keys, SHAPES["239m"]) < sizes[1]
    assert expected_bytes(keys, SHAPES["239m"], Workload(4)) == 2 * sizes[0]
    assert expected_bytes(keys, SHAPES["239m"], Workload(2, 128, 4)) > sizes[0]
    matches = step_matches("239m", Workload(2))[:1]
    assert len(split_to_fit(matches, SHAPES["239m"], sizes[0] * 2, Workload(2))) == 1
    assert len(split_to_fit(matches, SHAPES["239m"], sizes[0] * 2, Workload(4, 1024))) == 2


def test_rounds_have_as_many_micro_batches_with_accumulation() -> None:
    found = {count: Workload(2, 128, count).steps_of_round(4) for count in (1, 2, 4, 8)}
    assert found == {1: 4, 2: 2, 4: 1, 8: 1}


def test_a_step_trains_on_the_micro_batches_of_its_number() -> None:
    seen: list[torch.Tensor] = []

    class Seeing:
        def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
            seen.append(torch.cat(micro_batches))
            return torch.zeros(())

    rank = Rank()
    rank.shape, rank.trainer = TINY, Seeing()  # type: ignore[assignment]
    rank.steps(unmeasured=1, measured=1, length=16, accumulation=2)
    for number, tokens in enumerate(seen):
        batches = [batch_for(TINY, 0, 2 * number + each, 16) for each in range(2)]
        assert torch.equal(tokens, torch.cat(batches))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reference(accumulation: int) -> tuple[float, float]:
    """First loss and norm of one batch with all micro-batches in float64."""
    model = build_model(TINY).double()
    batches = [batch_for(TINY, 0, each, 16) for each in range(accumulation)]
    loss = loss_of(model, torch.cat(batches))
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return loss.item(), float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize(
    ("key", "accumulation"),
    [("plain@1", 3), ("ddp", 3), ("fsdp2", 3), ("fsdp2-keep", 3), ("stage0", 3), ("stage3", 3)],
)
def test_micro_batches_train_as_one_large_batch(key: str, accumulation: int, one_rank: None) -> None:
    contender = Workload(1, 16, accumulation).applied_to(CONTENDERS[key])
    trainer = trainer_class(contender.family)(TINY, **contender.options)
    batches = [batch_for(TINY, 0, each, 16) for each in range(accumulation)]
    loss = trainer.step(*batches)
    expected_loss, expected_norm = reference(accumulation)
    assert float(loss) == pytest.approx(expected_loss, rel=2**-7)
    assert trainer.gradient_norm() == pytest.approx(expected_norm, rel=2**-6)
    for _ in range(STEPS):
        loss = trainer.step(*batches)
    assert float(loss) < expected_loss


def test_deepspeed_has_the_accumulation() -> None:
    deepspeed_zero = pytest.importorskip("benchmarks.peers.deepspeed_zero")
    config = deepspeed_zero.configuration(stage=2, accumulation=4)
    assert config["gradient_accumulation_steps"] == 4
    assert deepspeed_zero.configuration(stage=2)["gradient_accumulation_steps"] == 1


def test_the_program_measures_its_workload(concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run_in_turn(keys: Any, model: str, *_: Any, workload: Workload) -> dict[str, Record]:
        asked.append((tuple(keys), model, workload))
        seconds = {"stage3": 0.79, "stage3-gloo": 0.91}
        return {key: Record([seconds.get(key, 1.0)] * 2, [2.0, 1.0], [1.0]) for key in keys}

    monkeypatch.setattr(step, "run_in_turn", run_in_turn)
    data, status = concluded(step.main, "34m", 2, 1, 1, "stage3,stage3-gloo,fsdp2", 2, 1024, 1)
    workload = Workload(2, 1024, 1)
    assert asked == [(("stage3", "fsdp2", "stage3-gloo"), "34m", workload)]
    assert [row["met"] for row in data["comparisons"]] == ["yes", "no"] and status == 1
    assert data["workload"] == {"ranks": 2, "tokens": 1024, "accumulation": 1}


def test_a_contender_that_fails_costs_its_own_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_in_turn(keys: Any, *_: Any, **__: Any) -> dict[str, Record]:
        if "stage3-gloo" in keys:
            raise TeamFailure("no gloo")
        return {key: Record([1.0], [2.0], [1.0]) for key in keys}

    monkeypatch.setattr(step, "run_in_turn", run_in_turn)
    matches = select(STEP_MATCHES, ["stage3", "stage3-gloo", "fsdp2"])
    _, rows, failures = step.measure([TINY], matches, 1, 1, 1, Console())
    assert [(row["subject"], row["peer"]) for row in rows] == [("stage3", "fsdp2")]
    assert failures == ["tiny, stage3-gloo / fsdp2: no gloo"]


def test_teams_have_the_ranks_and_sizes_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Noting:
        def __init__(self, name: str, ranks: int, threads: int) -> None:
            self.ranks = ranks

        def __enter__(self) -> Noting:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self, contender: Any, shape: str) -> None:
            asked.append({"ranks": contender.ranks, "options": contender.options})

        def ask(self, command: str, **arguments: Any) -> list[Any]:
            if command == "steps":
                asked.append(arguments)
                return [{"losses": [1.0], "seconds": 1.0}] * self.ranks
            return [1.0] * self.ranks

    monkeypatch.setattr(duel, "Team", Noting)
    duel.run_in_turn(["stage3"], "tiny", 1, 2, 3, lambda _: None, workload=Workload(4, 64, 2))
    sizes = {"length": 64, "accumulation": 2}
    assert asked == [
        {"ranks": 4, "options": {"stage": 3, "accumulation": 2}},
        {"unmeasured": 3, "measured": 0, **sizes},
        {"unmeasured": 1, "measured": 2, **sizes},
    ]
