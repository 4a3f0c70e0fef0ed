"""The sweep of peers' knobs: what it tries, what it chooses, and how contenders use the choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from benchmarks.harness.duel import Record
from benchmarks.harness.ranks import TeamFailure
from benchmarks.harness.shapes import SHAPES
from benchmarks.peers import CONTENDERS, contender_named, ddp, fsdp2, sweep, titles_of, tuned_settings
from benchmarks.peers.contenders import Contender
from benchmarks.peers.knobs import knobs_of
from benchmarks.peers.sweep import SWEPT, Budget
from benchmarks.peers.tuned_settings import PACKAGES, SETTINGS_OF, set_by_path

BUDGET = Budget(settings=24, rounds=3, steps=1, warm_up=1)
Seconds = Callable[[dict[str, Any]], float]
DDP = CONTENDERS["ddp"]


def pretended(
    seconds: Seconds, losses: Callable[[dict[str, Any]], list[float]], tried: list[dict[str, Any]]
) -> Any:
    """`run_in_turn` of sides that take ``seconds`` by their settings, on a machine that slows down."""

    def run(keys: Any, model: str, rounds: int, *_: Any) -> dict[str, Record]:
        contenders: Mapping[str, Contender] = _[-1]
        settings = {key: contenders[key].options["settings"] for key in keys}
        tried.extend(each for key, each in settings.items() if key == sweep.CANDIDATE)
        costs = {key: seconds(each) for key, each in settings.items()}
        return {
            key: Record([costs[key] * (1 + turn) for turn in range(rounds)], losses(each))
            for key, each in settings.items()
        }

    return run


def run_sweep(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Seconds,
    losses: Callable[[dict[str, Any]], list[float]] = lambda _: [2.0, 1.0],
    budget: Budget = BUDGET,
) -> tuple[list[sweep.Trial], list[dict[str, Any]]]:
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(sweep, "run_in_turn", pretended(seconds, losses, tried))
    return sweep.sweep(DDP, "tiny", budget, lambda _: None), tried


def bucket_of_100(settings: dict[str, Any]) -> float:
    return 0.5 if settings.get("bucket_cap_mb") == 100 else 1.0


def test_the_fastest_setting_of_each_knob_is_the_base_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(settings: dict[str, Any]) -> float:
        return bucket_of_100(settings) + (0.2 if settings.get("static_graph") else 0.4)

    trials, tried = run_sweep(monkeypatch, seconds)
    best = {"bucket_cap_mb": 100, "static_graph": True}
    assert sweep.chosen(trials) == best
    assert tried == [
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb": 1000},
        {"bucket_cap_mb": 100, "gradient_as_bucket_view": False},
        best,
        best,  # once more, against the defaults
    ]
    assert [trial.outcome for trial in trials].count("better") == 3
    assert trials[-1].ratio == pytest.approx(0.7 / 1.4)


def test_without_a_faster_setting_the_defaults_are_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, _ = run_sweep(monkeypatch, lambda settings: 1.0 - 0.009 * bool(settings))
    assert sweep.chosen(trials) == {}
    assert {trial.outcome for trial in trials} == {"not better"} and trials[-1].knob != "choice"


def test_a_choice_that_is_not_faster_than_the_defaults_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looked faster for a while."""
    calls: list[int] = []

    def seconds(settings: dict[str, Any]) -> float:
        calls.append(1)
        return 0.5 if settings and len(calls) < 6 else 1.0

    trials, _ = run_sweep(monkeypatch, seconds)
    assert trials[-1].knob == "choice" and trials[0].outcome == "better"
    assert sweep.chosen(trials) == {}


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ([2.0, 1.0], "better"),
        ([2.0, 1.0 + 2**-8], "better"),
        ([2.0, 1.0 + 2**-6], "losses differ"),
        ([2.0 + 2**-20, 1.0], "losses differ"),
        ([2.0, float("nan")], "losses differ"),
    ],
)
def test_a_setting_with_other_losses_is_dropped(
    losses: list[float], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(settings: dict[str, Any]) -> list[float]:
        return losses if settings.get("bucket_cap_mb") == 100 else [2.0, 1.0]

    trials, _ = run_sweep(monkeypatch, bucket_of_100, of)
    assert trials[1].outcome == outcome
    assert (sweep.chosen(trials) == {"bucket_cap_mb": 100}) == (outcome == "better")


def test_a_setting_that_fails_is_recorded_and_the_defaults_have_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(settings: dict[str, Any]) -> float:
        if settings.get("bucket_cap_mb") == 1:
            raise TeamFailure("rank 0 ended")
        return bucket_of_100(settings)

    trials, _ = run_sweep(monkeypatch, seconds)
    assert (trials[0].outcome, trials[0].failure) == ("failed", "rank 0 ended")
    assert sweep.chosen(trials) == {"bucket_cap_mb": 100}

    def never(settings: dict[str, Any]) -> float:
        raise TeamFailure("rank 1 ended")

    with pytest.raises(TeamFailure, match="rank 1"):
        run_sweep(monkeypatch, never)


@pytest.mark.parametrize("total_bytes", [1, 2**40])
def test_sides_that_need_too_much_memory_start_anew_in_each_turn(
    total_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    def run(keys: tuple[str, ...], *arguments: Any) -> dict[str, Record]:
        started.append(keys)
        return pretended(bucket_of_100, lambda _: [2.0, 1.0], [])(keys, *arguments)

    monkeypatch.setattr(sweep, "run_in_turn", run)
    monkeypatch.setattr(sweep, "total_bytes", lambda: total_bytes)
    trials = sweep.sweep(DDP, "tiny", BUDGET, lambda _: None)
    assert sweep.chosen(trials) == {"bucket_cap_mb": 100}
    assert {len(trial.seconds) for trial in trials} == {len(trial.best_seconds) for trial in trials} == {3}
    one, other = (sweep.BEST,), (sweep.CANDIDATE,)
    turns = [one, other, other, one, one, other] if total_bytes == 1 else [one + other]
    assert started == [one, *turns * len(trials)]


def test_all_peers_have_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, tried = run_sweep(monkeypatch, lambda _: 1.0, budget=Budget(2, 1, 1, 1))
    assert len(trials) == len(tried) == 2
    counts = {
        key: sum(len(knob.alternatives) for knob in knobs_of(CONTENDERS[key])) for key in SWEPT.split(",")
    }
    assert min(counts.values()) >= 5 and max(counts.values()) <= BUDGET.settings


def test_every_peer_that_is_compared_is_swept_or_has_the_settings_of_one() -> None:
    tunable = {key for key, each in CONTENDERS.items() if each.family in PACKAGES}
    assert tunable - {"deepspeed3-stored@1"} == {*SWEPT.split(","), *SETTINGS_OF}
    for key in ("stage3", "fsdp2-muon"):
        with pytest.raises(ValueError, match="settings of its own"):
            knobs_of(CONTENDERS[key])


@pytest.fixture
def settings_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tuned_settings"
    monkeypatch.setattr(tuned_settings, "FOLDER", folder)
    return folder


def swept(key: str, settings: dict[str, Any], version: str | None = None) -> dict[str, Any]:
    own = tuned_settings.package_version(CONTENDERS[key].family)
    return {"settings": settings, "version": version or own}


def test_contenders_have_the_settings_of_their_model(settings_folder: Path) -> None:
    settings = {"zero_optimization.overlap_comm": True}
    tuned_settings.record("34m", "deepspeed2", swept("deepspeed2", settings), settings_folder)
    tuned_settings.record("34m", "ddp", swept("ddp", {}), settings_folder)
    tuned_settings.record("34m", "fsdp2", swept("fsdp2", {"forward_prefetch": 1}, "0.1"), settings_folder)
    assert list(json.loads((settings_folder / "34m.json").read_text())) == ["ddp", "deepspeed2", "fsdp2"]
    tuned = contender_named("deepspeed2", "34m")
    assert tuned.options == {"stage": 2, "settings": settings} and tuned.title == "DeepSpeed 2"
    assert contender_named("deepspeed2-muon", "34m").options["settings"] == settings
    # The defaults were best.
    assert contender_named("ddp", "34m").title == DDP.title
    assert contender_named("ddp", "34m").options["settings"] == {}
    # Another model, another version of the peer, no sweep, no model.
    for key, model in (("deepspeed2", "239m"), ("fsdp2", "34m"), ("deepspeed3", "34m"), ("deepspeed2", None)):
        contender = contender_named(key, model)
        assert contender.title == f"{CONTENDERS[key].title} (defaults)"
        assert contender.options == CONTENDERS[key].options
    assert titles_of("stage2", "deepspeed2", "34m") == "zero_ext stage 2 / DeepSpeed 2"
    assert contender_named("stage2", "34m") == CONTENDERS["stage2"]


@pytest.mark.parametrize(("default_runs", "status"), [(True, 0), (False, 1)])
def test_the_command_records_choice_and_trials(
    default_runs: bool,
    status: int,
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seconds(settings: dict[str, Any]) -> float:
        if not default_runs:
            raise TeamFailure("rank 0 ended")
        return bucket_of_100(settings)

    monkeypatch.setattr(sweep, "run_in_turn", pretended(seconds, lambda _: [1.0], []))
    ended = 0
    try:
        sweep.main("tiny", "ddp", 24, 1, 1, 1, settings_folder)
    except typer.Exit as exit_:
        ended = exit_.exit_code
    assert ended == status and ("FAILED" in capsys.readouterr().out) == bool(status)
    if default_runs:
        recorded = json.loads((settings_folder / "tiny.json").read_text())["ddp"]
        assert recorded["settings"] == {"bucket_cap_mb": 100} and len(recorded["trials"]) == 6
        assert contender_named("ddp", "tiny").options == {"settings": {"bucket_cap_mb": 100}}
    with pytest.raises(typer.BadParameter, match="own"):
        sweep.main("tiny", "stage3", 24, 1, 1, 1, settings_folder)


def test_settings_of_a_path_are_set_in_their_section() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "steps": 1}
    set_by_path(
        config, {"zero_optimization.offload_optimizer.pin_memory": False, "aio.queue_depth": 32, "steps": 2}
    )
    assert config == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": False}},
        "aio": {"queue_depth": 32},
        "steps": 2,
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, {"gradient_as_bucket_view": True}),
        ({"bucket_cap_mb": 1}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
        ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": False}),
    ],
)
def test_ddp_has_the_settings(
    settings: dict[str, Any] | None, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def wrap(module: nn.Module, **arguments: Any) -> nn.Module:
        found.update(arguments)
        return module

    monkeypatch.setattr(ddp, "DistributedDataParallel", wrap)
    ddp.DDPTrainer(SHAPES["tiny"], settings=settings)
    assert found == expected


class Sharded:
    """Calls of `fully_shard` and of its prefetch methods, by name of module."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reshard: dict[str, bool] = {}
        self.prefetch: dict[str, list[str]] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        monkeypatch.setattr(fsdp2, "init_device_mesh", lambda *_: None)
        monkeypatch.setattr(fsdp2.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(fsdp2, "fully_shard", self._shard)

    def _shard(self, modules: Any, *, reshard_after_forward: bool, **_: Any) -> None:
        group = modules if isinstance(modules, list) else [modules]
        self.reshard[" ".join(self._names[id(module)] for module in group)] = reshard_after_forward
        for module in group:
            for direction in ("forward", "backward"):
                setattr(module, f"set_modules_to_{direction}_prefetch", self._note(module, direction))

    def _note(self, module: nn.Module, direction: str) -> Callable[[list[nn.Module]], None]:
        def note(modules: list[nn.Module]) -> None:
            name = f"{direction} of {self._names[id(module)]}"
            self.prefetch[name] = [self._names[id(each)] for each in modules]

        return note


FIRST, LAST = "model.layers.0", "model.layers.1"


@pytest.mark.parametrize(
    ("settings", "reshard", "prefetch"),
    [
        ({}, {FIRST: True, LAST: True, "": True}, {}),
        ({"reshard_last_layer": False}, {FIRST: True, LAST: False, "": True}, {}),
        (
            {"separate_groups": True},
            {FIRST: True, LAST: True, "model.embed_tokens": True, "model.norm lm_head": False, "": True},
            {},
        ),
        (
            {"forward_prefetch": 2, "backward_prefetch": 1},
            {FIRST: True, LAST: True, "": True},
            {
                f"forward of {FIRST}": [LAST],
                f"forward of {LAST}": [],
                f"backward of {FIRST}": [],
                f"backward of {LAST}": [FIRST],
            },
        ),
    ],
)
def test_fsdp2_has_the_settings(
    settings: dict[str, Any],
    reshard: dict[str, bool],
    prefetch: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fsdp2.build_model(SHAPES["tiny"])
    monkeypatch.setattr(fsdp2, "build_model", lambda _: model)
    found = Sharded(model, monkeypatch)
    trainer = fsdp2.FSDP2Trainer(SHAPES["tiny"], reshard_after_forward=True, settings=settings)
    assert trainer.model.get_parameter("lm_head.weight").dtype == torch.float32
    assert (found.reshard, found.prefetch) == (reshard, prefetch)
    with pytest.raises(TypeError, match="no_such"):
        fsdp2.FSDP2Trainer(SHAPES["tiny"], reshard_after_forward=True, settings={"no_such": 1})
