"""Property tests: round trips, and one random mistake always gives an error that names its path."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zero_ext.config import ConfigError, ZeroConfig, load_config, load_deepspeed_config
from zero_ext.config.base_section import key_paths
from zero_ext.config.deepspeed.translate import KEYS, SECTIONS
from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.config.training import SCHEDULERS

calm = settings(deadline=None)
DTYPES = ["fp32", "bf16", "fp16"]
COUNTS = st.integers(1, 2**62)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
PARAMS = st.dictionaries(
    st.text("abcdef_", min_size=1, max_size=8), SCALARS | st.lists(SCALARS, max_size=2), max_size=3
)


def named(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any] | None]:
    return st.none() | st.fixed_dictionaries({"type": st.sampled_from(names), "params": PARAMS})


@st.composite
def offloads(draw: st.DrawFn, stage: int) -> dict[str, Any]:
    """Tiers that the stage allows, with folders if one of them is nvme."""
    found: dict[str, Any] = {
        kind: draw(st.sampled_from(["device", "host", "nvme"]))
        for kind, needed in (("optimizer", 1), ("grads", 2), ("params", 3))
        if stage >= needed and draw(st.booleans())
    }
    if "nvme" in found.values():
        names = st.text("abcdef", min_size=1, max_size=5)
        found["nvme_paths"] = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    found["staging_buffer_bytes"] = 4096 * draw(st.integers(256, 2**50))
    found["checksum"] = draw(st.booleans())
    return found


@st.composite
def monitors(draw: st.DrawFn) -> dict[str, Any]:
    positions = st.booleans() | st.text(min_size=1, max_size=5)
    complete = {
        "output_dir": draw(st.text(min_size=1, max_size=5)),
        "log_interval": draw(COUNTS),
        **{name: draw(positions) for name in ("jsonl", "csv", "tensorboard", "comms")},
        "wandb": draw(st.none() | st.just({"mode": "offline"})),
        "timing": draw(st.booleans()),
        "memory": draw(st.booleans()),
        "flops": draw(st.none() | st.builds(lambda peak: {"peak": peak}, st.floats(1.0, 1e18))),
        "trace": draw(st.none() | st.builds(lambda steps: {"steps": steps}, COUNTS)),
        "progress": draw(st.none() | st.builds(lambda steps: {"steps": steps}, COUNTS)),
    }
    return {name: value for name, value in complete.items() if draw(st.booleans())}


@st.composite
def natives(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(["keep", *DTYPES]))
    scale = {
        "static": draw(st.floats(0, 2.0**20)),
        "initial_power": draw(st.integers(1, 126)),
        "window": draw(COUNTS),
        "hysteresis": draw(COUNTS),
        "consecutive_hysteresis": draw(st.booleans()),
        "minimum": draw(st.floats(2.0**-20, 2.0)),
    }
    stage = draw(st.integers(0, 3))
    experts = draw(st.sampled_from(["all", "routed"])) if stage == 3 else "all"
    moments = draw(st.sampled_from([*DTYPES[:2], "8bit"]))
    skips = experts == "routed" and moments != "8bit" and draw(st.booleans())
    complete = {
        "stage": stage,
        "precision": {
            "dtype": dtype,
            "grad_accum_dtype": draw(st.sampled_from(DTYPES)),
            "moments_dtype": moments,
            "communication_dtype": draw(st.none() | st.sampled_from(DTYPES)),
        },
        "loss_scale": scale if dtype in ("keep", "fp16") else {},
        "units": {
            "block_classes": draw(st.lists(st.text(min_size=1, max_size=5), max_size=3)),
            "leaf_modules": draw(st.lists(st.text(min_size=1, max_size=5), max_size=3)),
            "bucket_elements": draw(COUNTS),
            "persistence_threshold": draw(st.integers(0, 2**62)),
            "max_live_elements": draw(COUNTS),
            "prefetch_elements": draw(st.integers(0, 2**62)),
            "experts": experts,
            "update_experts": "routed" if skips else "all",
        },
        "batch": {
            name: draw(COUNTS)
            for name in ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
            if draw(st.booleans())
        },
        "offload": draw(offloads(stage)),
        "aio": {
            "backend": draw(st.sampled_from(["auto", "io_uring", "libaio", "threads"])),
            "queue_depth": draw(st.integers(1, 1024)),
            "block_bytes": 4096 * draw(st.integers(1, 2**50)),
            "io_threads": draw(st.integers(1, 16)),
        },
        "optimizer": draw(named(tuple(name for name, row in OPTIMIZERS.items() if not row.one_bit_stages))),
        "scheduler": draw(named(SCHEDULERS)),
        "checkpoint": {
            "keep_last": draw(st.none() | COUNTS),
            "async_save": draw(st.booleans()),
            "tag_validation": draw(st.sampled_from(["ignore", "warn", "fail"])),
        },
        "gradient_clipping": draw(st.floats(0, 1e6)),
        "check_finite": draw(st.booleans()),
        "timeout_seconds": draw(st.floats(0.001, 1e6)),
        "steps_per_print": draw(st.none() | COUNTS),
        "monitor": draw(st.none() | monitors()),
        "seed": draw(st.integers(0, 2**62)),
    }
    return {name: value for name, value in complete.items() if draw(st.booleans())}


@calm
@given(natives())
def test_native_round_trip(values: dict[str, Any]) -> None:
    config = load_config(values)
    mapping = config.to_mapping()
    assert load_config(json.loads(json.dumps(mapping))) == config
    assert config.replace() == config
    for path, value in leaves(values):
        if path.split(".")[0] not in ("optimizer", "scheduler"):
            assert at(mapping, path) == value


def leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        found += leaves(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return found


def at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def groups(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = [prefix.rstrip(".")]
    for name, value in values.items():
        if isinstance(value, dict) and name != "params":
            found += groups(value, f"{prefix}{name}.")
    return found


def add(values: dict[str, Any], group: str, name: str, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    position = at(changed, group) if group else changed
    position[name] = value
    return changed


def refusal(load: Any, values: dict[str, Any]) -> ConfigError:
    try:
        load(values)
    except ConfigError as error:
        return error
    raise AssertionError(f"accepted: {values}")


@st.composite
def misspelt(draw: st.DrawFn, known: list[str]) -> str:
    """A known name with one letter changed, dropped, doubled, or two swapped; or a random one."""
    name = draw(st.sampled_from(known))
    position = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from("abcxyz_0"))
    return draw(
        st.sampled_from(
            [
                name[:position] + name[position + 1 :],
                name[:position] + letter + name[position + 1 :],
                name[:position] + letter + name[position:],
                name[:position] + name[position : position + 2][::-1] + name[position + 2 :],
            ]
        )
        | st.text("abcdefgh_", min_size=1, max_size=12)
    )


NATIVE_PATHS = sorted(key_paths(ZeroConfig))
LISTS = (
    "units.block_classes",
    "units.leaf_modules",
    "offload.nvme_paths",
    "activation_checkpointing.save_ops",
    "activation_checkpointing.nvme_paths",
)
NATIVE_NAMES = sorted({path.rpartition(".")[2] for path in NATIVE_PATHS})
DEEPSPEED_NAMES = sorted({path.rpartition(".")[2] for path in [*KEYS, *SECTIONS]})
WRONG = st.sampled_from(["nonsense", "4", [], {"x": 1}, float("nan"), float("inf"), -3, 2**70])
ANY_SIZE = ("gradient_clipping", "loss_scale.static", "monitor.flops.peak", "monitor.flops.per_step")
ANY_TEXT = (
    *(f"monitor.{name}" for name in ("output_dir", "jsonl", "csv", "tensorboard", "comms")),
    *(f"monitor.wandb.{name}" for name in ("project", "group", "entity", "name")),
)
FULL = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 5,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
        "leaf_module": {"names": ["a"]},
    },
    "checkpoint": {"tag_validation": "warn"},
    "aio": {"queue_depth": 8},
    "tensorboard": {"enabled": False},
}


@calm
@given(values=natives(), name=misspelt(NATIVE_NAMES), data=st.data())
def test_native_unknown_key_is_named(values: dict[str, Any], name: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(groups(values)))
    path = f"{group}.{name}" if group else name
    assume(name and path not in NATIVE_PATHS)
    error = refusal(load_config, add(values, group, name, 1))
    assert path in error.paths
    assert path in str(error)


@calm
@given(path=st.sampled_from([p for p in NATIVE_PATHS if not p.endswith("params")]), wrong=WRONG)
def test_native_wrong_value_is_named(path: str, wrong: object) -> None:
    assume(not (wrong == [] and path in LISTS))
    assume(not (wrong == {"x": 1} and path == "units.tiles"))  # a module of that name in one tile is right
    assume(not (wrong == 2**70 and path in ANY_SIZE))
    assume(not (isinstance(wrong, str) and path in ANY_TEXT))
    values: Any = wrong
    for name in reversed(path.split(".")):
        values = {name: values}
    error = refusal(load_config, values)
    assert any(found.startswith(path) for found in error.paths)
    assert path in str(error)


@calm
@given(name=misspelt(DEEPSPEED_NAMES), data=st.data())
def test_deepspeed_unknown_key_is_named(name: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(groups(FULL)))
    path = f"{group}.{name}" if group else name
    assume(name and path not in KEYS and path not in SECTIONS)
    error = refusal(load_deepspeed_config, add(FULL, group, name, 1))
    assert path in error.paths
    assert path in str(error)


@calm
@given(
    path=st.sampled_from(sorted(path for path, key in KEYS.items() if key.value_type.words != "anything")),
    wrong=WRONG,
)
def test_deepspeed_wrong_value_is_named(path: str, wrong: object) -> None:
    assume(not KEYS[path].value_type.fits(wrong))
    values: Any = wrong
    for name in reversed(path.split(".")):
        values = {name: values}
    error = refusal(load_deepspeed_config, values)
    assert path in error.paths
    assert path in str(error)


@calm
@given(
    st.recursive(
        SCALARS | st.just("auto"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(DEEPSPEED_NAMES) | st.text(max_size=6), inner, max_size=4)
        ),
        max_leaves=12,
    ).filter(lambda value: isinstance(value, dict))
)
def test_any_json_is_translated_or_refused(values: dict[str, Any]) -> None:
    """Whatever the JSON, the outcome is a checked configuration or a ConfigError: never another exception."""
    for load in (load_config, load_deepspeed_config):
        try:
            load(values)
        except ConfigError as error:
            assert error.problems


def test_full_example_is_accepted() -> None:
    assert load_deepspeed_config(FULL).config.stage == 3
