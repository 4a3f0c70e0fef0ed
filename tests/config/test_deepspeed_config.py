"""DeepSpeed's JSON: every key is honoured, reported once, or refused by name."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from zero_ext.config import (
    ConfigError,
    FlopsConfig,
    MonitorConfig,
    WandbConfig,
    ZeroConfig,
    load_deepspeed_config,
)
from zero_ext.config.deepspeed.deepspeed_keys import Key
from zero_ext.config.deepspeed.translate import KEYS, SECTIONS, TABLE
from zero_ext.config.sparse_attention import MODE_KEYS

_NVME = {"device": "nvme", "nvme_path": "/nvme"}
LAMB = {"eps_inside_sqrt": True, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.08}


def nested(path: str, value: object) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[return-value]


def optimizer(kind: str, **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = dict(one)
    for name, value in other.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def with_switch(key: Key, value: object) -> dict[str, Any]:
    """`value` at `key`, inside a configuration where the key acts."""
    config = nested(key.path, value)
    if key.switch:
        config = merged(config, nested(key.switch, "cpu" if key.switch.endswith("device") else True))
    if key.path.startswith("aio."):
        config = merged(config, nested("zero_optimization.offload_optimizer", _NVME))
    section, _, name = key.path.partition(".")
    if section == "sparse_attention" and name not in ("mode", "block", "attention"):
        mode = next(mode for mode, keys in MODE_KEYS.items() if name in keys)
        own = {"different_layout_per_head": True} if name == "num_different_global_patterns" else {}
        config = merged(config, {section: {"mode": mode, **own}})
    if key.path != "zero_optimization.stage":
        config = merged(config, nested("zero_optimization.stage", key.stages[-1]))
    return config


def test_introductory_configuration() -> None:
    source = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    before = copy.deepcopy(source)
    found = load_deepspeed_config(source)
    assert source == before
    assert found.config.stage == 2
    assert found.config.precision.dtype == "fp16"
    assert [found.config.batch.resolve(ranks).micro_batch_size for ranks in (1, 2, 4)] == [8, 4, 2]
    assert found.config.gradient_clipping == 1.0
    assert [(note.path, note.outcome) for note in found.notes] == [("gradient_clipping", "default")]


# DeepSpeed's key and its value, the native key, and its value where it is another one.
TRANSLATED: list[tuple[str, Any, str, Any]] = [
    ("train_batch_size", 32, "batch.train_batch_size", 32),
    ("train_micro_batch_size_per_gpu", 4, "batch.micro_batch_size", 4),
    ("gradient_accumulation_steps", 2, "batch.gradient_accumulation_steps", 2),
    ("dataloader_drop_last", True, "batch.drop_last", True),
    ("steps_per_print", 7, "steps_per_print", 7),
    ("gradient_clipping", 0.5, "gradient_clipping", 0.5),
    ("communication_data_type", "FP32", "precision.communication_dtype", "fp32"),
    ("data_types.grad_accum_dtype", "bf16", "precision.grad_accum_dtype", "bf16"),
    ("fp16.enabled", True, "precision.dtype", "fp16"),
    ("fp16.loss_scale", 0, "loss_scale.static", 0.0),
    ("fp16.initial_scale_power", 12, "loss_scale.initial_power", 12),
    ("fp16.loss_scale_window", 500, "loss_scale.window", 500),
    ("fp16.hysteresis", 3, "loss_scale.hysteresis", 3),
    ("fp16.consecutive_hysteresis", True, "loss_scale.consecutive_hysteresis", True),
    ("fp16.min_loss_scale", 2, "loss_scale.minimum", 2.0),
    ("optimizer.type", "Adam", "optimizer.type", "Adam"),
    ("optimizer.params", {"lr": 0.01}, "optimizer.params", {"lr": 0.01, "weight_decay": 0.0}),
    ("scheduler.type", "WarmupLR", "scheduler.type", "WarmupLR"),
    ("scheduler.params", {"warmup_num_steps": 5}, "scheduler.params", {"warmup_num_steps": 5}),
    ("zero_optimization.stage", 3, "stage", 3),
    ("zero_optimization.stage3_prefetch_bucket_size", 11, "units.prefetch_elements", 11),
    ("zero_optimization.stage3_param_persistence_threshold", 1e5, "units.persistence_threshold", 100_000),
    ("zero_optimization.stage3_max_live_parameters", 13, "units.max_live_elements", 13),
    (
        "zero_optimization.leaf_module.classes",
        ["pkg.mod.Experts"],
        "units.leaf_modules",
        ["Experts", "model.moe"],
    ),
    ("zero_optimization.leaf_module.names", "model.moe", "units.leaf_modules", ["Experts", "model.moe"]),
    ("checkpoint.tag_validation", "Fail", "checkpoint.tag_validation", "fail"),
]


def test_values_arrive_at_native_keys() -> None:
    source: dict[str, Any] = {}
    native: dict[str, Any] = {}
    for path, value, native_path, native_value in TRANSLATED:
        source, native = (
            merged(source, nested(path, value)),
            merged(native, nested(native_path, native_value)),
        )
    assert load_deepspeed_config(source).config == ZeroConfig.from_mapping(native)


def test_bucket_size_acts_below_stage_3_only() -> None:
    two = load_deepspeed_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 99}})
    assert two.config.units.bucket_elements == 99
    three = load_deepspeed_config({"zero_optimization": {"stage": 3, "reduce_bucket_size": 99}})
    assert three.config.units == ZeroConfig().units
    assert any(note.path == "zero_optimization.reduce_bucket_size" for note in three.notes)


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_bf16_under_both_names(section: str) -> None:
    on = {"enabled": True, "bf16_optimizer_states": True}
    config = load_deepspeed_config({section: on, "fp16": {"enabled": False, "loss_scale": 8}}).config
    assert (config.precision.dtype, config.precision.moments_dtype) == ("bf16", "bf16")
    for value, wanted in ((True, True), (False, False), ("auto", True)):
        source = {section: {"enabled": True, "check_grad_overflow": value}}
        assert load_deepspeed_config(source).config.check_finite is wanted
    off = {section: {"enabled": False, "check_grad_overflow": False}}
    assert load_deepspeed_config(off).config.check_finite and load_deepspeed_config({}).config.check_finite


def test_stage_is_0_when_missing() -> None:
    assert load_deepspeed_config({}).config.stage == 0


@pytest.mark.parametrize("key", TABLE, ids=lambda key: key.path)
def test_every_key_has_a_visible_fate(key: Key) -> None:
    """A value that asks for something is taken over, noted, or refused by path: never dropped in silence."""
    kinds = {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}
    asking = {
        "a mapping": {"x": 1},
        "anything": {"enabled": True, "x": 1},
        "true or false": True,
        "a string": kinds.get(key.path, "x"),
        "a path": "/nvme",
        "a string or a list of strings": ["Experts"],
        "'none', 'cpu' or 'nvme'": "cpu",
        "'mean' or 'sum'": "sum",
        "'ignore', 'warn' or 'fail'": "fail",
        "16, 32, 64 or 128": 64,
        "a list of integers of at least 0": [5],
        "'unidirectional' or 'bidirectional'": "unidirectional",
        "'dense', 'fixed', 'variable', 'bigbird', 'bslongformer' or 'local_sliding_window'": "variable",
    }
    words = key.value_type.words.removesuffix(", or null")
    first = 4096 if key.path == "aio.block_size" else asking.get(words)
    candidates = [first, False, 2, 0.5, "bf16", "fp16"]
    value = next(
        v for v in candidates if v is not None and key.value_type.fits(v) and key.asks_for_something(v)
    )
    source = with_switch(key, value)
    if key.path.endswith(".params"):
        kind = key.path.replace("params", "type")
        source = merged(source, nested(kind, kinds[kind]))
    without = with_switch(key, key.harmless[0] if key.harmless else value)
    try:
        found = load_deepspeed_config(source)
    except ConfigError as error:
        switched = [other.path for other in TABLE if other.switch == key.path]
        about = (key.path, key.switch, *switched)
        assert any(path in about for path in error.paths), error
        dtypes = ("torch_autocast.dtype", "data_types.param_dtype")
        assert key.fate == "unsupported" or key.path in dtypes or key.switch or switched
        return
    assert key.fate != "unsupported" or key.switch
    noted = [note.path for note in found.notes]
    assert len(noted) == len(set(noted)), "each key is reported once"
    if key.fate == "no effect":
        assert key.path in noted or key.switch in noted
    elif key.harmless and without != source:
        assert found.config != load_deepspeed_config(without).config
    elif key.native:
        assert found.config != load_deepspeed_config(nested("zero_optimization.stage", 0)).config


@pytest.mark.parametrize("key", [key for key in TABLE if key.harmless], ids=lambda key: key.path)
def test_harmless_values_pass_in_silence(key: Key) -> None:
    for value in key.harmless:
        found = load_deepspeed_config(with_switch(key, value))
        assert [note.path for note in found.notes if note.outcome == "no effect"] == []


FP16 = {"fp16": {"enabled": True}}
# A key, its value, and words of the error about it.
WRONG_VALUES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("zero_optimisation", {}, ("Did you mean zero_optimization?",)),
    ("zero_optimization.stagee", 1, ("Did you mean",)),
    ("reduce_bucket_size", 1, ("zero_optimization.reduce_bucket_size",)),
    ("zero_optimization.stage", 4, ("got 4", "0 to 3")),
    ("zero_optimization.stage", True, ("got True (bool)",)),
    ("zero_optimization", True, ('{"stage": 1}',)),
    ("zero_optimization.offload_optimizer.device", "GPU", ("got 'GPU'", "'cpu'")),
    ("zero_optimization.offload_optimizer.device", "auto", ("expected a value, got 'auto'",)),
    ("fp16", 3, ("expected a mapping",)),
    ("fp16.enabled", 1, ("got 1 (int)", "true or false")),
    ("train_batch_size", 0, ("at least 1",)),
    ("train_batch_size", "16", ("got '16' (str)",)),
    ("train_batch_size", True, ("got True (bool)",)),
    ("gradient_clipping", math.nan, ("got nan",)),
    ("gradient_clipping", 10**400, ("finite",)),
    ("communication_data_type", "int8", ("'fp32', 'fp16' or 'bf16'",)),
    ("optimizer", "auto", ("expected a mapping",)),
    ("optimizer.type", "LBFGS", ("expected a supported optimizer, got LBFGS",)),
    ("optimizer.type", "AdmW", ("Did you mean Adam",)),
    ("sparse_attention.mode", "sparse", ("'bigbird'",)),
    ("sparse_attention.block", 48, ("got 48", "16, 32, 64 or 128")),
    ("", 1, ("unknown key",)),
]
# A configuration, the key that the error names, and words of the error.
MISTAKES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({**FP16, "bf16": {"enabled": True}}, "bf16.enabled", ("expected false with fp16.enabled true",)),
    (
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        "bfloat16.enabled",
        ("the same as bf16.enabled",),
    ),
    (
        nested("fp16", FP16["fp16"] | {"min_loss_scale": 100, "initial_scale_power": 2}),
        "fp16.min_loss_scale",
        ("raise initial_power",),
    ),
    ({**FP16, "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", ("fp16.enabled is true",)),
    ({"train_batch_size": 10**5000}, "train_batch_size", ("too large to print",)),
    ({"fp16": {"a.b": 1}}, "fp16.a.b", ("expected a string without dots", "got 'a.b'")),
    ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel", ("autotp_size to 1",)),
    ({"tensor_parallel": {"autotp_size": True}}, "tensor_parallel", ("unsupported",)),
    ({"data_efficiency": {"enabled": True}}, "data_efficiency", ("unsupported",)),
    ({"compile": {"deepcompile": True}}, "compile", ("torch.compile",)),
    ({"zero_optimization": {"stage": [], "sub_group_size": 5}}, "zero_optimization.stage", ("got []",)),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type", ("missing",)),
    (
        {"optimizer": {"type": "onebitadam"}, **nested("zero_optimization.stage", 2)},
        "zero_optimization.stage",
        ("OneBitAdam", "stage to 0 or 1"),
    ),
    (optimizer("ZeroOneAdam", amsgrad=True), "optimizer.params.amsgrad", ("expected false",)),
    (optimizer("AdamW", max_grad_norm=1), "optimizer.params.max_grad_norm", ("gradient_clipping",)),
    (optimizer("AdamW", bias_correction=False), "optimizer.params.bias_correction", ("expected true",)),
    ({"optimizer": {"type": "AdamW", "params": None}}, "optimizer.params", ("got None",)),
    (
        nested("sparse_attention", {"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 3}),
        "sparse_attention.num_global_blocks",
        ("expected a divisor of",),
    ),
    (
        nested("sparse_attention", {"mode": "variable", "local_window_blocks": [4, "x"]}),
        "sparse_attention.local_window_blocks",
        ("a list of integers",),
    ),
]


@pytest.mark.parametrize(
    ("source", "path", "fragments"),
    [*((nested(path, value), path or "''", words) for path, value, words in WRONG_VALUES), *MISTAKES],
)
def test_mistakes_are_named(source: dict[str, Any], path: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_config(source)
    assert path in caught.value.paths
    for fragment in (path, *fragments):
        assert fragment in str(caught.value)


def test_sections_that_are_off_ask_for_nothing() -> None:
    found = load_deepspeed_config(
        {
            "gradient_clipping": 0,
            "amp": {"enabled": False, "opt_level": "O1"},
            "tensorboard": {"enabled": False, "output_path": "x"},
            "tensor_parallel": {"autotp_size": 1},
            "compile": {"deepcompile": False},
            "zero_optimization": {
                "offload_param": {"device": "none", "pin_memory": True},
                "offload_optimizer": None,
            },
        }
    )
    assert found.notes == ()
    assert found.config == ZeroConfig(stage=0)


def test_auto_is_resolved_or_refused() -> None:
    source = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_config(source)
    assert set(caught.value.paths) == {
        "train_micro_batch_size_per_gpu",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
    }
    assert "resolve={'optimizer.params.lr': value}" in str(caught.value)
    resolve = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16.enabled": True,
        "optimizer.params.lr": 0.25,
        "optimizer.params.weight_decay": 0.5,
        "zero_optimization.stage3_prefetch_bucket_size": 77,
        "gradient_clipping": 3.0,
    }
    config = load_deepspeed_config(source, resolve=resolve).config
    assert config.batch.micro_batch_size == 4
    assert config.precision.dtype == "bf16"
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.25, "weight_decay": 0.5}
    assert config.units.prefetch_elements == 77
    assert config.units.bucket_elements == ZeroConfig().units.bucket_elements
    assert config.gradient_clipping == 1.0, "only 'auto' is filled in"


def test_resolved_values_are_checked_too_and_may_have_any_name() -> None:
    for source, resolve, words in (
        ({"train_batch_size": "auto"}, {"train_batch_size": -1}, "expected an integer of at least 1, got -1"),
        ({}, {"train_batchsize": 1}, "unknown key. Did you mean train_batch_size"),
        ({"train_batch_size": "auto"}, {"train_batch_size": "auto"}, "expected a value, got 'auto'"),
        (optimizer("AdamW", lr="auto"), {"optimizer.params.lr": "auto"}, "expected a value, got 'auto'"),
    ):
        (path,) = resolve
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {words}")):
            load_deepspeed_config(source, resolve=resolve)
    zero = nested("zero_optimization", {"stage": 3, "stage3_prefetch_bucket_size": "auto"})
    found = load_deepspeed_config(zero, resolve={"zero_optimization.prefetch_bucket_size": 5})
    assert found.config.units.prefetch_elements == 5


@pytest.mark.parametrize(
    ("kind", "params", "native", "noted"),
    [
        ("Adam", {}, {"lr": 1e-3, "weight_decay": 0.0}, None),
        ("Adam", {"torch_adam": True}, {}, "torch_adam"),
        (
            "Lion",
            {"betas": [0.8, 0.9], "set_grad_none": True},
            {"lr": 1e-3, "betas": [0.8, 0.9]},
            "set_grad_none",
        ),
        ("Lion", {}, {"lr": 1e-3, "betas": [0.9, 0.999]}, None),
        ("lamb", LAMB, LAMB, None),
    ],
)
def test_optimizers_have_deepspeeds_names_and_defaults(
    kind: str, params: dict[str, Any], native: dict[str, Any], noted: str | None
) -> None:
    found = load_deepspeed_config({"optimizer": {"type": kind, **({"params": params} if params else {})}})
    assert found.config.optimizer is not None
    assert (found.config.optimizer.type, found.config.optimizer.params) == (kind.capitalize(), native)
    notes = [note.path for note in found.notes if note.path.startswith("optimizer")]
    assert notes == ([f"optimizer.params.{noted}"] if noted else [])
    with pytest.raises(ConfigError, match="max_grad_norm: it is unsupported, as in DeepSpeed"):
        load_deepspeed_config(optimizer("Lamb", max_grad_norm=1.0))


def test_never_printing_may_be_infinity() -> None:
    assert load_deepspeed_config({"steps_per_print": math.inf}).config.steps_per_print is None


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 9}}))
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_config(path)
    assert str(caught.value).startswith(f"{path}: zero_optimization.stage")
    with pytest.raises(TypeError, match="a mapping or a path"):
        load_deepspeed_config(3)  # type: ignore[arg-type]


def test_table_is_consistent() -> None:
    assert len(KEYS) == sum(1 + len(key.aliases) for key in TABLE), "no path twice"
    assert not set(KEYS) & SECTIONS, "a path is a key or a section, not both"
    for key in TABLE:
        assert key.why
        assert key.fate == "supported" or not key.native
        assert not key.switch or key.switch in KEYS
        assert all(key.value_type.fits(value) for value in key.harmless), key.path


def test_monitors_become_native_ones() -> None:
    found = load_deepspeed_config(
        {
            "gradient_clipping": 0,
            "tensorboard": {"enabled": True, "output_path": "logs/tb", "job_name": "a"},
            "csv_monitor": {"enabled": True, "output_path": "logs"},
            "wandb": {"enabled": True, "team": "us", "group": None},
            "comms_logger": {"enabled": True, "verbose": True},
            "flops_profiler": {"enabled": True, "profile_step": 3},
            "wall_clock_breakdown": True,
        }
    )
    assert {note.outcome for note in found.notes} == {"no effect"}
    assert [note.path for note in found.notes] == ["comms_logger.verbose", "flops_profiler.profile_step"]
    assert found.config == ZeroConfig(
        stage=0,
        steps_per_print=10,
        monitor=MonitorConfig(
            jsonl=False,
            timing=True,
            memory=False,
            tensorboard="logs/tb/a",
            csv="logs/DeepSpeedJobName/steps.csv",
            wandb=WandbConfig(project="deepspeed", entity="us"),
            comms=True,
            flops=FlopsConfig(),
        ),
    )


def test_a_breakdown_alone_is_printed_as_often_as_said() -> None:
    found = load_deepspeed_config({"memory_breakdown": True, "steps_per_print": 3}).config
    assert found.steps_per_print == 3
    assert found.monitor == MonitorConfig(jsonl=False, timing=False, memory=True)
    assert load_deepspeed_config({"wall_clock_breakdown": False}).config.monitor is None
