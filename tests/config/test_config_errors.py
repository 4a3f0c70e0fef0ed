"""Errors of hostile configurations: short, printable, and found in time that grows with the file only."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from zero_ext.config import ConfigError, load_config, load_deepspeed_config
from zero_ext.config.config_errors import Problem
from zero_ext.config.training import OptimizerConfig
from zero_ext.optim.optimizer_builder import build_optimizer

KEYS = 60_000
MEGABYTE = 1 << 20


def build(source: dict[str, Any]) -> None:
    policy = OptimizerConfig(type="Adam", params=source)
    build_optimizer(policy, [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("prefix", ["key", "stag", "zero_optimizatio", "lr"])
@pytest.mark.parametrize("load", [load_config, load_deepspeed_config, build])
def test_thousands_of_unknown_keys(load: Callable[[Any], Any], prefix: str) -> None:
    source = {f"{prefix}{number}": number for number in range(KEYS)}
    with (
        mock.patch("difflib.get_close_matches", wraps=difflib.get_close_matches) as compared,
        pytest.raises(ConfigError) as caught,
    ):
        load(source)
    text = str(caught.value)
    assert compared.call_count <= 40
    assert len(text.encode()) <= 2000 and len(caught.value.problems) == KEYS
    shown = text.count("\n  - ") - 1
    assert shown > 0 and f"{prefix}{shown - 1}: " in text and text.endswith(f"\n  - and {KEYS - shown} more")


@pytest.mark.parametrize(
    "source",
    [
        {"k" * MEGABYTE: 1},
        {"stage": "v" * MEGABYTE},
        {"offload": {"k" * MEGABYTE: {"v" * MEGABYTE: 1}}, "zero_optimization": {"ü" * MEGABYTE: 1}},
        {"optimizer": {"type": "t" * MEGABYTE, "params": {}}, "zero_optimization": "z" * MEGABYTE},
        {"\x1b[2J\ud800" * 1000: 1, "stage": "\x1b[2J\ud800"},
        {"\n" * MEGABYTE: 1, "stage": [["n"] * MEGABYTE]},
    ],
    ids=range(6),
)
@pytest.mark.parametrize("load", [load_config, load_deepspeed_config])
def test_long_and_unprintable_texts(load: Callable[[Any], Any], source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    text = str(caught.value)
    assert len(text.encode()) <= 2000
    assert text.replace("\n", "").isprintable()


def test_a_few_problems_are_all_listed_in_full() -> None:
    problems = [Problem(f"key{number}", "w" * 80) for number in range(15)]
    assert str(ConfigError(problems, "a.json")) == "a.json: " + "".join(f"\n  - {each}" for each in problems)
    assert str(ConfigError(problems[0], "a.json")) == f"a.json: {problems[0]}"
