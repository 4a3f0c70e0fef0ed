"""DeepSpeed keys of sparse attention, monitors, checkpoints and of features that do not exist here, and what
depends on several of them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import show
from zero_ext.config.sparse_attention import BLOCK_SIZES, MODE_KEYS, LayoutMode

from .deepspeed_keys import (
    ANYTHING,
    FLAG,
    MAPPING,
    TEXT,
    Key,
    ResolvedKeys,
    ValueType,
    choice,
    integer,
    no_effect,
    or_null,
    section,
    supported,
    unsupported,
)

_COUNTS = ValueType(
    "a list of integers of at least 0",
    lambda value: isinstance(value, list) and all(is_number(v) and v == int(v) and v >= 0 for v in value),
)
_BLOCK = ValueType("16, 32, 64 or 128", lambda value: is_number(value) and value in BLOCK_SIZES)

# A table, whose rows need no line for each argument.
# fmt: off
# The section that DeepSpeed 0.15.4 had and 0.19 refuses.
_ATTENTION_KEYS = section(
    "sparse_attention",
    supported("mode", choice(*MODE_KEYS),
        "sparsity pattern. The default is 'fixed' if other keys of the section are set"),
    supported("block", _BLOCK,
        "side length of a block, in tokens. Sequence lengths need not be multiples of it"),
    supported("attention", choice("unidirectional", "bidirectional"),
        "direction of attention, in every mode. The value unidirectional also masks later tokens inside "
        "blocks"),
    supported("different_layout_per_head", FLAG,
        "whether the layout differs between heads. Heads with the same layout share its storage"),
    supported("num_local_blocks", integer(1), "number of blocks per window, in mode fixed"),
    supported("num_global_blocks", integer(1), "number of global blocks, in modes fixed and bigbird"),
    supported("horizontal_global_attention", FLAG,
        "whether global blocks also attend to all blocks, in modes fixed and variable"),
    supported("num_different_global_patterns", integer(1), "number of global patterns, in mode fixed"),
    supported("num_random_blocks", integer(0),
        "number of random blocks per row, in modes variable and bigbird. The default is 0"),
    supported("local_window_blocks", _COUNTS, "numbers of blocks of the first windows, in mode variable"),
    supported("global_block_indices", _COUNTS,
        "indices of global blocks, in modes variable and bslongformer"),
    supported("global_block_end_indices", or_null(_COUNTS),
        "exclusive ends of ranges of global blocks, in modes variable and bslongformer"),
    supported("num_sliding_window_blocks", integer(1),
        "width of the sliding window in blocks, in modes bigbird, bslongformer and local_sliding_window"),
)
# fmt: on


def _switched(name: str, enabled: Key, fields: dict[str, ValueType], used: bool = True) -> tuple[Key, ...]:
    """Return the keys of a section with an `enabled` key.

    While that is false, the other keys are checked and ignored. They always are, unless `used`.
    """
    detail = f"It applies if {name}.enabled is true" if used else "It is checked but not used"
    fate = enabled.fate if used else "no effect"
    others = (Key(each, kind, fate, f"setting of {name}. {detail}") for each, kind in fields.items())
    return section(name, enabled, *others, switch="enabled", auto=True)


def _enabled(why: str) -> Key:
    return supported("enabled", FLAG, why, harmless=(False,), auto=True)


_RUN = {"output_path": TEXT, "job_name": TEXT}
_PRINTED = "The line of steps_per_print, by default every 10 steps, then reports"
_STEP_TIMES = "step times are part of the engine's events"

# fmt: off
_REPORT_KEYS = (
    *_switched("tensorboard", _enabled("whether to set monitor.tensorboard to output_path/job_name"), _RUN),
    *_switched("csv_monitor", _enabled("whether to set monitor.csv to output_path/job_name/steps.csv"), _RUN),
    *_switched(
        "wandb",
        _enabled("whether to set monitor.wandb with project, group, and team as entity"),
        dict.fromkeys(("group", "team", "project"), or_null(TEXT)),
    ),
    *_switched(
        "comet",
        no_effect("enabled", FLAG, "there is no Comet writer here. Use tensorboard, wandb or csv_monitor",
            False, auto=True),
        {
            "samples_log_interval": integer(1),
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_name", "experiment_key"), or_null(TEXT)
            ),
            "online": or_null(FLAG),
            "mode": or_null(TEXT),
        },
        used=False,
    ),
    *_switched(
        "comms_logger",
        _enabled(
            "whether to set monitor.comms to true, which writes bytes and times of all collectives to "
            "comms.jsonl"
        ),
        {"prof_all": FLAG, "prof_ops": ANYTHING, "verbose": FLAG, "debug": FLAG},
        used=False,
    ),
    *_switched(
        "flops_profiler",
        _enabled(f"whether to set monitor.flops to {{}}. {_PRINTED} operations per second"),
        dict.fromkeys(
            (
                "recompute_fwd_factor",
                "profile_step",
                "module_depth",
                "top_modules",
                "detailed",
                "output_file",
            ),
            ANYTHING,
        ),
        used=False,
    ),
    no_effect("timers.throughput.enabled", FLAG, _STEP_TIMES),
    no_effect("timers.throughput.synchronized", FLAG, _STEP_TIMES),
    supported("wall_clock_breakdown", FLAG,
        f"whether to set monitor.timing to true. {_PRINTED} phases and waits", harmless=(False,)),
    supported("memory_breakdown", FLAG, f"whether to set monitor.memory to true. {_PRINTED} bytes by tier",
        harmless=(False,)),
    no_effect("dump_state", FLAG, "print(engine.config) shows the configuration", False),
    no_effect("log_level", or_null(TEXT), "set the level with Python's logging module", None),
    no_effect("disable_python_gc", FLAG, "the engine does not change the garbage collector", False),
    no_effect("vocabulary_size", or_null(integer(1)), "no feature depends on it", None),
    no_effect("disable_allgather", FLAG, "parameters are always gathered with all-gather", False),
)

_CHECKPOINT_KEYS = (
    *section(
        "checkpoint",
        supported("tag_validation", choice("ignore", "warn", "fail"),
            "what to do when ranks save under different tags", "checkpoint.tag_validation"),
        no_effect("load_universal", FLAG, "every checkpoint can be loaded at any world size and stage",
            False),
        unsupported("use_node_local_storage", FLAG, "All ranks write below one shared directory. Save there",
            False),
        no_effect("parallel_write.pipeline_stage", FLAG, "every rank writes its own shards", False),
        no_effect("checkpoint_serialization", FLAG, "checkpoint files always have the format safetensors"),
        no_effect("writer", or_null(MAPPING), "there is one checkpoint writer", None),
    ),
    no_effect("datastates_ckpt", ANYTHING, "use the native key checkpoint.async_save", None, False),
)
# fmt: on

_NOT_YET = "This feature does not exist here. Remove it"
_EXPERTS = (
    "Remove it. For experts on different ranks use zero_ext.parallel.experts.MixtureOfExperts, on the axis "
    "'ep' of zero_ext.parallel.make_mesh"
)
_AT_CALLS = "calls of deepspeed.checkpointing.checkpoint and zero_ext.checkpoint_activations"


def _activation(name: str, value_type: ValueType, why: str, switch: str = "") -> Key:
    return supported(name, value_type, why, f"activation_checkpointing.{name}", switch=switch)


# fmt: off
_ACTIVATION_KEYS = section(
    "activation_checkpointing",
    _activation("partition_activations", FLAG,
        f"whether to partition the inputs of {_AT_CALLS}. The group is that of "
        "deepspeed.checkpointing.configure(mpu)"),
    _activation("cpu_checkpointing", FLAG, f"whether to store the inputs of {_AT_CALLS} in host memory"),
    _activation("contiguous_memory_optimization", FLAG,
        f"whether to store the inputs of {_AT_CALLS} in one buffer, partitioned or not"),
    _activation("number_checkpoints", or_null(integer(1)),
        "largest number of calls with inputs in the buffer of contiguous_memory_optimization",
        "contiguous_memory_optimization"),
    _activation("synchronize_checkpoint_boundary", FLAG,
        f"whether to wait for the device before and after {_AT_CALLS}"),
    _activation("profile", FLAG, f"whether to publish events to monitors for {_AT_CALLS}"),
)
# fmt: on

# Whole sections are refused unless they are empty, null, false, or say enabled: false.
_NOTHING: tuple[object, ...] = (None, False, {})
_MISSING_SECTIONS = (
    "amp", "autotuning", "compression_training", "curriculum_learning", "data_efficiency", "eigenvalue",
    "elasticity", "hybrid_engine", "nebula", "progressive_layer_drop", "quantize_training",
    "weight_quantization",
)  # fmt: skip
# fmt: off
_ABSENT_KEYS = (
    unsupported("sequence_parallel_size", integer(1),
        "Remove it. Call zero_ext.integrations.apply_sequence_parallel in the script", 1),
    no_effect("seq_parallel_communication_data_type", or_null(choice("fp32", "fp16", "bf16")),
        "sequence parallelism sends tensors in their own dtype", None),
    unsupported("use_data_before_expert_parallelism", FLAG, _EXPERTS, False),
    unsupported("expert_parallel", ANYTHING, _EXPERTS, *_NOTHING),
    unsupported("graph_harvesting", FLAG, _NOT_YET, False),
    *(unsupported(name, ANYTHING, _NOT_YET, *_NOTHING) for name in _MISSING_SECTIONS),
    unsupported("compile", ANYTHING,
        "DeepCompile does not exist here. Remove the section and use torch.compile on the model's blocks",
        *_NOTHING),
    unsupported("pipeline", ANYTHING,
        "Remove the section. Build the pipeline in the script, with deepspeed.pipe.PipelineModule (which has "
        "an argument activation_checkpoint_interval) or zero_ext.parallel.pipeline", *_NOTHING),
    unsupported("tensor_parallel", ANYTHING,
        "Remove the section or set autotp_size to 1. Call zero_ext.parallel.apply_tensor_parallel in the "
        "script", *_NOTHING),
)
# fmt: on

FEATURE_KEYS = _ATTENTION_KEYS + _REPORT_KEYS + _CHECKPOINT_KEYS + _ACTIVATION_KEYS + _ABSENT_KEYS

_ZERO = "zero_optimization"
_STEPS_PER_PRINT = 10
_JOB = "DeepSpeedJobName"
_BREAKDOWNS = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler.enabled")


def set_communication(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set quantized communication, secondary shards and sharding groups, in the stages that support them."""
    values = resolved.values
    if resolved.stage in (2, 3) and values.get(f"{_ZERO}.zero_quantized_gradients") is True:
        native["communication.quantized_gradients"] = "int4"
    if resolved.stage != 3:
        return
    if values.get(f"{_ZERO}.zero_quantized_weights") is True:
        native["communication.quantized_weights"] = "int8"
    node = values.get(f"{_ZERO}.zero_hpz_partition_size", 1)
    if node > 1:
        native["communication.hierarchical_partition"] = True
        native["communication.ranks_per_node"] = node
    group = values.get(f"{_ZERO}.mics_shard_size", -1)
    if group == -1:
        return
    path = resolved.written[f"{_ZERO}.mics_shard_size"]
    native["communication.shard_group_size"] = group
    others = {
        "zero_quantized_gradients": "communication.quantized_gradients",
        "zero_hpz_partition_size": "communication.hierarchical_partition",
    }
    found = [name for name, key in others.items() if key in native]
    if group == 0:
        resolved.add_problem(
            path, "expected -1 for none or the ranks of a sharding group, got 0. Set it to one of them."
        )
    elif found:
        resolved.add_problem(
            path, f"got {show(group)} together with {found[0]}, which are not combined. Remove one."
        )


def set_monitors(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set the native ``monitor`` section, if any of DeepSpeed's monitors or breakdowns is on.

    Only these are then on.
    """
    on = {
        name
        for name in ("tensorboard", "csv_monitor", "wandb", "comms_logger", "flops_profiler")
        if resolved.values.get(f"{name}.enabled") is True
    }
    times, memory = (
        resolved.values.get(name) is True for name in ("wall_clock_breakdown", "memory_breakdown")
    )
    if not (on or times or memory):
        return
    native["monitor"] = {
        "jsonl": False,
        "timing": times,
        "memory": memory,
        "comms": "comms_logger" in on,
        **({"tensorboard": str(_folder("tensorboard", resolved))} if "tensorboard" in on else {}),
        **({"csv": str(_folder("csv_monitor", resolved) / "steps.csv")} if "csv_monitor" in on else {}),
        **({"wandb": _wandb(resolved)} if "wandb" in on else {}),
        **({"flops": {}} if "flops_profiler" in on else {}),
    }
    if any(resolved.values.get(name) is True for name in _BREAKDOWNS):
        native.setdefault("steps_per_print", _STEPS_PER_PRINT)


def _folder(section: str, resolved: ResolvedKeys) -> PurePosixPath:
    path, job = (_text(f"{section}.{name}", resolved) for name in ("output_path", "job_name"))
    return PurePosixPath(path or "") / (job or _JOB)


def _wandb(resolved: ResolvedKeys) -> dict[str, object]:
    return {
        "project": _text("wandb.project", resolved) or "deepspeed",
        "group": _text("wandb.group", resolved),
        "entity": _text("wandb.team", resolved),
    }


def _text(path: str, resolved: ResolvedKeys) -> str | None:
    """Return the value of a text key, or None if it is empty."""
    return resolved.values.get(path) or None


def set_sparse_attention(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set the native `sparse_attention` section, if any: the keys its mode uses, a note for others.

    DeepSpeed's own documentation lists the keys of all modes for one mode, so that none of them is a
    mistake.
    """
    prefix = "sparse_attention."
    values = {
        path.removeprefix(prefix): value.lower() if isinstance(value, str) else value
        for path, value in resolved.values.items()
        if path.startswith(prefix)
    }
    if not values:
        return
    mode: LayoutMode = next((known for known in MODE_KEYS if known == values.get("mode")), "fixed")
    section: dict[str, Any] = {"mode": mode}
    for name, value in values.items():
        if name in ("mode", "block", "attention", *MODE_KEYS[mode]):
            section[name] = value
        else:
            resolved.note(f"{prefix}{name}", f"the mode is {mode}, which does not use it")
    if mode == "bigbird" and "num_random_blocks" not in section:
        section["num_random_blocks"] = 0
        resolved.note(
            f"{prefix}num_random_blocks", "not set, so 0 as in DeepSpeed's JSON. The paper uses 3", "default"
        )
    native["sparse_attention"] = section
