"""Checkpoints of optimizers that exchange signs: exact on the same ranks, errors forgotten on others."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.step.one_bit.training import COURSES, Branching, check_same, parameters, prepared, train
from zero_ext.zero import engine_of

MODULE = "tests.checkpoint.test_one_bit"
STOPS = [
    ("1-bit Adam", 2),  # in the warm-up
    ("1-bit Adam", 7),
    ("1-bit Adam, moments sharded", 5),
    ("1-bit Adam, moments sharded, bf16", 6),
    ("0/1 Adam", 6),  # between two updates of the variance
    ("0/1 Adam", 15),  # between two exchanges
    ("0/1 Adam, bf16", 8),
    ("0/1 Adam, moments sharded", 10),
    ("1-bit LAMB", 3),
    ("1-bit LAMB", 8),
]


def held(optimizer: Any) -> dict[str, torch.Tensor]:
    shards: dict[str, torch.Tensor] = optimizer.state_dict()["shards"]
    return shards


def save_on_rank(world: World, directory: str, name: str, stop: int, seed: int) -> dict[str, Any]:
    course = COURSES[name]
    model, optimizer, _ = prepared(world, course, seed)
    train(world, course, seed, model, optimizer, range(stop))
    zero_ext.save_checkpoint(directory, model)
    shards, state = {key: value.clone() for key, value in held(optimizer).items()}, optimizer.state_dict()
    torch.save(state, f"{directory}/optimizer-{world.rank}")
    torch.save(parameters(model), f"{directory}/model-{world.rank}")
    losses = train(world, course, seed, model, optimizer, range(stop, course.steps))
    return {"saved": shards, "losses": losses, "shards": held(optimizer), "parameters": parameters(model)}


def load_on_rank(world: World, directory: str, name: str, stop: int, seed: int) -> dict[str, Any]:
    course = COURSES[name]
    model, optimizer, _ = prepared(world, course, seed + 1)
    train(world, course, seed + 1, model, optimizer, range(course.steps))  # its own state, which must go
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_ext").addHandler(handler)
    zero_ext.load_checkpoint(directory, model)
    logging.getLogger("zero_ext").removeHandler(handler)
    loaded = {key: value.clone() for key, value in held(optimizer).items()}
    losses = train(world, course, seed, model, optimizer, range(stop, course.steps))
    result = {"saved": loaded, "losses": losses, "shards": held(optimizer), "parameters": parameters(model)}
    return {**result, "warnings": warnings}


def load_own_on_rank(world: World, directory: str, name: str, stop: int, seed: int) -> dict[str, Any]:
    """By the optimizer's own state_dict, into a model that has the other run's place in the course."""
    course = COURSES[name]
    model, optimizer, _ = prepared(world, course, seed)
    train(world, course, seed + 2, model, optimizer, range(stop))
    optimizer.load_state_dict(torch.load(f"{directory}/optimizer-{world.rank}"))
    check_same(parameters(model), torch.load(f"{directory}/model-{world.rank}"))
    losses = train(world, course, seed, model, optimizer, range(stop, course.steps))
    return {"losses": losses, "shards": held(optimizer), "parameters": parameters(model)}


@pytest.mark.by_turns()
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("name", "stop"), STOPS)
def test_a_resumed_run_goes_on_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, name: str, stop: int, ranks: int
) -> None:
    arguments = {"directory": str(tmp_path), "name": name, "stop": stop, "seed": secrets.randbits(20)}
    through = rank_pool.run(ranks, f"{MODULE}:save_on_rank", arguments)
    for load in ("load_on_rank", "load_own_on_rank"):
        for first, second in zip(through, rank_pool.run(ranks, f"{MODULE}:{load}", arguments), strict=True):
            assert first["losses"] == second["losses"]
            check_same(first["parameters"], second["parameters"])
            check_same(first["shards"], second["shards"])
            assert not second.get("warnings")
            if "saved" in second:
                check_same(first["saved"], second["saved"])


@pytest.mark.parametrize(("name", "stop"), [STOPS[1], STOPS[3], STOPS[5]])
def test_on_other_ranks_errors_start_at_zero_and_it_is_said(
    rank_pool: RankPool, tmp_path: Path, name: str, stop: int
) -> None:
    arguments = {"directory": str(tmp_path), "name": name, "stop": stop, "seed": secrets.randbits(20)}
    saved = _full_state(rank_pool.run(3, f"{MODULE}:save_on_rank", arguments))
    for ranks in (1, 2):
        results = rank_pool.run(ranks, f"{MODULE}:load_on_rank", arguments)
        check_same(saved, _full_state(results))
        assert ["start at zero" in text for text in results[0]["warnings"]] == [True]
        assert all(torch.isfinite(torch.tensor(each["losses"])).all() for each in results)


def _full_state(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Full masters and moments from all ranks' slices."""
    slices: dict[str, dict[int, torch.Tensor]] = {}
    for result in results:
        for key, value in result["saved"].items():
            kind_and_name, _, start = key.rpartition("/")
            if value.numel() and not kind_and_name.startswith("one_bit_"):
                slices.setdefault(kind_and_name, {})[int(start)] = value
    return {key: torch.cat([runs[start] for start in sorted(runs)]) for key, runs in slices.items()}


def resume_adam_on_rank(world: World, directory: str) -> None:
    course = COURSES["1-bit Adam"]
    adam = course._replace(kind="AdamW", policy={})
    model, optimizer, _ = prepared_adam(world, adam)
    train(world, adam, 3, model, optimizer, range(4))
    zero_ext.save_checkpoint(directory, model)
    before = held(optimizer)
    for stage in (0, 1):
        other, resumed, _ = prepared(world, course._replace(stage=stage), 5)
        zero_ext.load_checkpoint(directory, other)
        assert resumed.param_groups[0]["lr"] == 0.5 and "amsgrad" not in resumed.param_groups[0]
        for key, value in held(resumed).items():
            if stage == 0:
                assert torch.equal(value, before[key])
        # Four steps were made, and freeze_step is 3.
        train(world, course, 3, other, resumed, range(4, 6))
        kinds = engine_of(other).traffic.last_bytes_sent
        assert (kinds["onebit_reduce_scatter"] > 0) == (world.size > 1)


def prepared_adam(world: World, course: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(4)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, eps=1e-3)
    config = {"stage": 0, "units": {"bucket_elements": 900}, "timeout_seconds": 120.0}
    return *zero_ext.prepare(model, optimizer, config, process_group=world.group), None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_adam_is_loaded(rank_pool: RankPool, tmp_path: Path, ranks: int) -> None:
    rank_pool.run(ranks, f"{MODULE}:resume_adam_on_rank", {"directory": str(tmp_path)})
