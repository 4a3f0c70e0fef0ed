"""TRL's own trainers under plain DDP and, as they are, under ``zero-ext run --config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.launch import RUN, found_in, started
from tests.integrations.trl.test_deepspeed_scripts import SCRIPT, check_alike, inputs_in

CASES = (
    *("sft-3", "sft-lora-3", "dpo-3", "dpo-sync-3", "kto-3", "reward-3"),
    *("rloo-judge-3", "grpo-3", "grpo-sync-ungathered-3", "grpo-lora-3", "grpo-judge-3"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What plain and sharded trainers computed, case by case; each way was started once."""
    folder = tmp_path_factory.mktemp("native")
    start, config = inputs_in(folder), folder / "zero3.json"
    config.write_text(json.dumps({"stage": 3}))
    results = {}
    for name, options in (("plain", []), ("sharded", ["--config", config])):
        (folder / name).mkdir()
        started([*RUN, *options, SCRIPT, start, folder / name, *CASES], ACCELERATE_USE_CPU="true")
        results[name] = found_in(folder / name)
    yield results


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_trains_alike(found: dict[str, dict[str, Any]], case: str) -> None:
    check_alike(found["sharded"][case], found["plain"][case])


@pytest.mark.parametrize("case", ["dpo", "grpo"])
def test_a_reference_that_follows_changes_the_losses(found: dict[str, dict[str, Any]], case: str) -> None:
    fixed, follows = (
        next(value["history"] for name, value in found["sharded"].items() if name.startswith(start))
        for start in (f"{case}-3", f"{case}-sync")
    )
    assert follows[1]["loss"] == pytest.approx(fixed[1]["loss"], rel=1e-5, abs=1e-6)  # mixed after step 2
    assert follows[2]["loss"] != pytest.approx(fixed[2]["loss"], rel=1e-3)


def test_ranks_generate_as_many_tokens_as_they_like(found: dict[str, dict[str, Any]]) -> None:
    (ids, logits), (wanted, plain) = (found[name]["grpo-3"]["generated"] for name in ("sharded", "plain"))
    assert ids == wanted and logits == pytest.approx(plain, rel=1e-4, abs=1e-5)
