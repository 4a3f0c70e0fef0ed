"""Native configuration: defaults, loading, and errors that name key, value seen and value wanted."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from types import MappingProxyType

import pytest

from zero_ext.config import (
    BatchConfig,
    ConfigError,
    LossScaleConfig,
    PrecisionConfig,
    UnitConfig,
    ZeroConfig,
    load_config,
)


def test_defaults_mean_off() -> None:
    config = load_config(None)
    assert config == ZeroConfig()
    assert config.stage == 3
    assert config.precision == PrecisionConfig(dtype="keep", grad_accum_dtype="fp32", moments_dtype="fp32")
    assert config.precision.communication_dtype is None
    assert config.loss_scale == LossScaleConfig(static=0.0, initial_power=16, window=1000, hysteresis=2)
    assert config.units.persistence_threshold == 0
    assert config.gradient_clipping == 0.0
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.batch.gradient_accumulation_steps == 1


def test_every_source_is_read_alike(tmp_path: Path) -> None:
    values = {
        "stage": 2,
        "units": {"bucket_elements": 5e8, "leaf_modules": ["Experts"]},
        "gradient_clipping": 1,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    wanted = ZeroConfig(
        stage=2,
        units=UnitConfig(bucket_elements=500_000_000, leaf_modules=("Experts",)),
        gradient_clipping=1.0,
    )
    assert load_config(values) == load_config(path) == load_config(str(path)) == load_config(wanted) == wanted
    assert load_config(wanted.to_mapping()) == wanted
    assert json.loads(json.dumps(wanted.to_mapping())) == wanted.to_mapping()


def test_frozen_and_replaced() -> None:
    config = ZeroConfig(stage=1)
    with pytest.raises(ValueError, match="frozen"):
        config.stage = 2
    assert config.replace(stage=2).stage == 2
    assert config.stage == 1
    with pytest.raises(ConfigError, match="stage: expected an integer from 0 to 3, got 9"):
        config.replace(stage=9)


@pytest.mark.parametrize(
    ("values", "path", "fragments"),
    [
        ({"stage": 4}, "stage", ("got 4 (int)", "an integer from 0 to 3")),
        ({"stage": -1}, "stage", ("got -1",)),
        ({"stage": True}, "stage", ("got True (bool)", "an integer")),
        ({"stage": "3"}, "stage", ("got '3' (str)",)),
        ({"stage": 2.5}, "stage", ("got 2.5",)),
        ({"stagee": 3}, "stagee", ("unknown key", "stage")),
        ({"unit": {}}, "unit", ("Did you mean units",)),
        ({"units": {"bucket": 3}}, "units.bucket", ("Did you mean units.bucket_elements",)),
        ({"units": 3}, "units", ("a mapping with keys", "max_live_elements")),
        ({"units": {"leaf_modules": "Experts"}}, "units.leaf_modules", ("a list of non-empty strings",)),
        ({"units": {"leaf_modules": ["a", 3]}}, "units.leaf_modules.1", ("got 3 (int)",)),
        ({"units": {"bucket_elements": 0}}, "units.bucket_elements", ("got 0", "at least 1")),
        ({"gradient_clipping": math.nan}, "gradient_clipping", ("got nan", "finite")),
        ({"gradient_clipping": math.inf}, "gradient_clipping", ("got inf",)),
        ({"gradient_clipping": True}, "gradient_clipping", ("got True (bool)",)),
        ({"gradient_clipping": "1"}, "gradient_clipping", ("got '1' (str)",)),
        ({"gradient_clipping": -1.0}, "gradient_clipping", ("got -1.0", "at least 0")),
        ({"check_finite": 1}, "check_finite", ("got 1 (int)", "true or false")),
        ({"timeout_seconds": 0}, "timeout_seconds", ("got 0", "above 0")),
        ({"steps_per_print": 1.5}, "steps_per_print", ("got 1.5",)),
        ({"monitor": {"csv": ""}}, "monitor.csv", ("got ''", "expected true, false or a path")),
        ({"monitor": {"tensorboard": 1}}, "monitor.tensorboard", ("got 1", "expected true, false or a path")),
        ({"monitor": {"progress": {}}}, "monitor.progress.steps", ("required key is missing",)),
        ({"seed": 10**5000}, "seed", ("too large to print",)),
        ({"precision": {"dtype": "float16"}}, "precision.dtype", ("'keep', 'fp32', 'bf16' or 'fp16'",)),
        ({"precision": {"moments_dtype": "fp16"}}, "precision.moments_dtype", ("'fp32', 'bf16' or '8bit'",)),
        ({"optimizer": {"params": {}}}, "optimizer.type", ("required key is missing",)),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type", ("expected a supported optimizer, got Muon",)),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type", ("Did you mean Adam",)),
        (
            {"scheduler": {"type": "LambdaLR"}},
            "scheduler.type",
            ("expected a supported scheduler, got LambdaLR", "lr_scheduler"),
        ),
        ({"optimizer": {"type": "SGD", "params": {"lr": math.nan}}}, "optimizer.params.lr", ("got nan",)),
        ({"optimizer": {"type": "SGD", "params": {"lr": [0, math.inf]}}}, "optimizer.params.lr.1", ("inf",)),
        ({"optimizer": {"type": "SGD", "params": {"lr": print}}}, "optimizer.params.lr", ("builtin",)),
        ({"gradient_clipping": 10**400}, "gradient_clipping", ("finite",)),
        ({"seed": 2**63}, "seed", ("at most 4611686018427387904",)),
        ({"optimizer": {"type": "SGD", "params": {"lr": 10**400}}}, "optimizer.params.lr", ("finite",)),
        ({"a.b": 1}, "a.b", ("unknown key", "stage")),
        ({"units": {"": 1}}, "units.''", ("unknown key",)),
        ({"loss_scale": {"minimum": 3e9}}, "loss_scale.minimum", ("65536", "raise initial_power")),
        ({"loss_scale": {"static": 8}, "precision": {"dtype": "bf16"}}, "loss_scale", ("fp16 only",)),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last", ("got 0", "or null")),
        ({"checkpoint": {"tag_validation": "WARN"}}, "checkpoint.tag_validation", ("'ignore'",)),
    ],
)
def test_mistakes_are_named(values: dict[str, object], path: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert path in caught.value.paths
    for fragment in (path, *fragments):
        assert fragment in str(caught.value)


def test_all_mistakes_at_once_and_file_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"stage": 7, "seed": -1, "unknown": 1}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert set(caught.value.paths) == {"stage", "seed", "unknown"}
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("key", ["zero_optimization", "train_micro_batch_size_per_gpu", "fp16", "bf16"])
def test_the_keys_of_deepspeed_are_known_as_such(tmp_path: Path, key: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({key: 1, "stage": 7}))
    for source in (path, {key: 1, "stage": 7}):
        with pytest.raises(ConfigError, match="load_deepspeed_config") as caught:
            load_config(source)
        assert {key, "stage"} < set(caught.value.paths)
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8})
    assert "DeepSpeed" not in str(caught.value)


def test_direct_construction_words_errors_alike() -> None:
    with pytest.raises(ConfigError, match="stage: expected an integer from 0 to 3, got 7"):
        ZeroConfig(stage=7)
    with pytest.raises(ConfigError, match="bucket_elements: expected an integer of at least 1, got 0"):
        UnitConfig(bucket_elements=0)
    with pytest.raises(TypeError, match="keyword arguments"):
        BatchConfig(4)  # type: ignore[misc]


def test_foreign_sources_are_refused() -> None:
    with pytest.raises(TypeError, match="configuration: expected a ZeroConfig"):
        load_config(3)  # type: ignore[arg-type]


def test_params_that_contain_themselves() -> None:
    params: dict[str, object] = {}
    params["a"] = params
    with pytest.raises(ConfigError, match="expected at most 8 nested levels"):
        load_config({"optimizer": {"type": "SGD", "params": params}})


def test_any_mapping_will_do() -> None:
    values = MappingProxyType({"units": MappingProxyType({"bucket_elements": 3})})
    assert load_config(values).units.bucket_elements == 3


def test_errors_survive_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"stage": 7, "seed": -1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.paths == ("stage", "seed")


def test_params_are_copied() -> None:
    params = {"lr": 0.1}
    config = load_config({"optimizer": {"type": "sgd", "params": params}})
    params["lr"] = 9.0
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1}
    assert config.optimizer.type == "SGD"
