"""Every function that takes a configuration takes it in every form, and the environment's changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero_ext
from tests.config.written import FORMS, Write, check
from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.sources.config_source import VARIABLE
from zero_ext.integrations import deepspeed
from zero_ext.zero.api.engine_lookup import engine_of

# What they know about an "auto" they are told, or they have no use for it.
RESOLVE = {"batch.train_batch_size": 4}
BF16 = {"bf16.enabled": True}


def _prepare(config: Any) -> ZeroConfig:
    model = nn.Linear(3, 2)
    zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config, wrap=False)
    return engine_of(model).config


def _initialize(config: Any) -> ZeroConfig:
    return zero_ext.initialize(model=nn.Linear(3, 2), config=config, resolve=RESOLVE)[0].zero_config


def _deepspeed(config: Any) -> ZeroConfig:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return deepspeed.initialize(model=nn.Linear(3, 2), optimizer=optimizer, config=config)[0].zero_config


ENTRANCES: dict[str, Callable[[Any], ZeroConfig]] = {
    "load_config": lambda config: zero_ext.load_config(config, RESOLVE),
    "initialize": _initialize,
}


@pytest.mark.parametrize("write", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_forms(entrance: Callable[[Any], ZeroConfig], write: Write, tmp_path: Path) -> None:
    check(entrance(write(tmp_path)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entrance", [_prepare, _deepspeed], ids=["prepare", "deepspeed"])
def test_what_nobody_resolves_is_named(
    entrance: Callable[[Any], ZeroConfig], form: str, tmp_path: Path
) -> None:
    source = FORMS[form](tmp_path)
    if "DeepSpeed" not in form:
        check(entrance(source))
        return
    with pytest.raises(ConfigError, match="train_batch_size: expected a value, got 'auto'"):
        entrance(source)


@pytest.mark.parametrize("entrance", [*ENTRANCES.values(), _prepare], ids=[*ENTRANCES, "prepare"])
def test_the_environment_changes_what_is_read(
    entrance: Callable[[Any], ZeroConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for source in ({"stage": 2}, ZeroConfig(stage=2), {"zero_optimization": {"stage": 2}}):
        caplog.clear()
        monkeypatch.setenv(VARIABLE, "gradient_clipping=0.5 check_finite=false")
        config = entrance(source)
        assert (config.stage, config.gradient_clipping) == (2, 0.5)
        assert not config.check_finite
        assert [record.getMessage() for record in caplog.records if VARIABLE in record.getMessage()] == [
            f"{VARIABLE}: sets gradient_clipping = 0.5 (float)",
            f"{VARIABLE}: sets check_finite = False (bool)",
        ]
    path = tmp_path / "other.json"
    path.write_text('{"stage": 1, "gradient_clipping": 2.0}')
    monkeypatch.setenv(VARIABLE, f"'{path}' gradient_clipping=0.5")
    config = entrance(None)
    assert (config.stage, config.gradient_clipping) == (1, 0.5)
    assert entrance({"stage": 2}).stage == 2
    assert f"{path} is not read" in caplog.text


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("stag=1", ("configuration with ZERO_EXT_CONFIG", "stag: unknown key. Did you mean stage?")),
        ("stage=4", ("stage: expected an integer from 0 to 3, got 4",)),
        ("stage=1 stage=1", ("expected every key once, got 'stage' twice",)),
        ('units={"a":1,"a":2}', ("'a': it occurs twice",)),
        ("bogus=null", ("bogus: unknown key",)),
        ("stage=true", ("stage: expected an integer from 0 to 3, got True",)),
        ("stage.real=2", ("stage: expected an integer from 0 to 3",)),
        ("stage=NaN", ("stage: expected an integer from 0 to 3, got nan",)),
        ("stage.=4", ("ZERO_EXT_CONFIG: expected key=value", "'stage.=4'")),
        ("=4", ("ZERO_EXT_CONFIG: expected key=value",)),
        ("one.json two.json", ("at most one file, got the files one.json, two.json",)),
        ("'stage=2", ("expected words", "No closing quotation")),
        (
            "zero_optimization.stage=1",
            ("zero_optimization: unknown key",),
        ),
        ("stage.x=1", ("stage: expected an integer from 0 to 3, got {'x': 1}",)),
    ],
)
def test_what_the_environment_cannot_say(
    text: str, fragments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        zero_ext.load_config({"stage": 2})
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_settings_are_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, 'stage=2 optimizer={"type":"SGD"}')
    config = zero_ext.load_config({"zero_optimization": {"stage": 1}})
    assert config.stage == 2 and zero_ext.load_config(config) is config
    assert zero_ext.load_config(config.replace(stage=3)).stage == _prepare(config.replace(stage=3)).stage == 3
    monkeypatch.delenv(VARIABLE)
    assert config == zero_ext.load_config(
        {"stage": 2, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {}}}
    )


def test_settings_have_their_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        VARIABLE,
        'offload.optimizer=nvme \'offload.nvme_paths=["/a b", "/c"]\' units.leaf_modules=["Block"] '
        "aio.queue_depth=8 gradient_clipping=1e-1",
    )
    config = zero_ext.load_config({"stage": 1})
    assert config.offload.nvme_paths == ("/a b", "/c") and config.units.leaf_modules == ("Block",)
    assert (config.aio.queue_depth, config.gradient_clipping) == (8, 0.1)


def test_values_of_auto() -> None:
    config = zero_ext.load_config(
        {"stage": 1, "gradient_clipping": "auto", "optimizer": {"type": "SGD", "params": {"lr": "auto"}}},
        {"gradient_clipping": 0.5, "optimizer.params.lr": 0.25, "stage": 3},
    )
    assert (config.stage, config.gradient_clipping) == (1, 0.5)
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.25}
    # Values of these keys, which nothing has to resolve.
    assert zero_ext.load_config({"precision": {"reduction": "auto"}}).precision.reduction == "auto"
    with pytest.raises(ConfigError) as caught:
        zero_ext.load_config({"stage": "auto", "units": {"bucket_elements": "auto"}})
    assert set(caught.value.paths) == {"stage", "units.bucket_elements"}
    for source, resolve, paths in (
        ({"stage": 7, "gradient_clipping": "auto"}, {}, {"stage", "gradient_clipping"}),
        ({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, {}, {"optimizer.params.lr"}),
        ({"stage": 1, "precision.dtype": "auto"}, {"precision.dtype": "bf16"}, {"precision.dtype"}),
        ({"stage": 1}, {"gradient_cliping": 1.0}, {"gradient_cliping"}),
        ({"bf16": {"enabled": "auto"}}, {"precision.dtype": "bfloat16"}, {"precision.dtype"}),
        (
            {"bfloat16": {"enabled": "auto"}, "bf16": {"enabled": True}},
            {"bf16.enabled": True},
            {"bf16.enabled"},
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            zero_ext.load_config(source, resolve)
        assert set(caught.value.paths) == paths
    assert zero_ext.load_config({"monitor": {"csv": "auto"}}).monitor is not None


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), torch.ones(2)])
def test_arrays_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gradient_clipping: expected a finite number"):
        zero_ext.load_config({"gradient_clipping": value})


def test_a_mapping_that_holds_itself_is_refused_at_once() -> None:
    values: dict[str, Any] = {}
    values["a"] = values["b"] = values
    with pytest.raises(ConfigError, match="expected at most 100000 values"):
        zero_ext.load_config(values)


def test_the_json_schema_may_be_named() -> None:
    assert zero_ext.load_config({"$schema": "zero_ext.schema.json", "stage": 1}).stage == 1
