"""DeepSpeed keys of checkpoints, logging, profiling, and of features that do not exist here."""

from __future__ import annotations

from .key import ANYTHING, FLAG, MAPPING, TEXT, Fate, Key, ValueType, choice, integer, or_null

_ANY_LOADS = "every checkpoint can be loaded at any world size and stage"


def _switched(
    section: str, fate: Fate, why: str, fields: dict[str, ValueType], used: bool = True
) -> tuple[Key, ...]:
    """Return the keys of a section with an `enabled` key.

    While that is false, the other keys are checked and ignored. They always are, unless `used`.
    """
    switch = f"{section}.enabled"
    other: Fate = fate if used else "no effect"
    detail = f"It applies if {switch} is true" if used else "It is checked but not used"
    return (
        Key(switch, FLAG, fate, why, harmless=(False,), auto=True),
        *(
            Key(f"{section}.{name}", kind, other, f"setting of {section}. {detail}", auto=True, switch=switch)
            for name, kind in fields.items()
        ),
    )


def _absent(section: str, why: str) -> Key:
    """Return a whole section that is refused unless it is empty, null, false, or says enabled: false."""
    return Key(section, ANYTHING, "unsupported", why, harmless=(None, False, {}))


_LOGGING = "there is no Comet writer here. Use tensorboard, wandb or csv_monitor"
_RUN = {"output_path": TEXT, "job_name": TEXT}
_PRINTED = "The line of steps_per_print, by default every 10 steps, then reports"

REPORT_KEYS = (
    *_switched(
        "tensorboard", "supported", "whether to set monitor.tensorboard to output_path/job_name", _RUN
    ),
    *_switched(
        "csv_monitor", "supported", "whether to set monitor.csv to output_path/job_name/steps.csv", _RUN
    ),
    *_switched(
        "wandb",
        "supported",
        "whether to set monitor.wandb with project, group, and team as entity",
        {"group": or_null(TEXT), "team": or_null(TEXT), "project": or_null(TEXT)},
    ),
    *_switched(
        "comet",
        "no effect",
        _LOGGING,
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
        "supported",
        "whether to set monitor.comms to true, which writes bytes and times of all collectives to "
        "comms.jsonl",
        {"prof_all": FLAG, "prof_ops": ANYTHING, "verbose": FLAG, "debug": FLAG},
        used=False,
    ),
    *_switched(
        "flops_profiler",
        "supported",
        f"whether to set monitor.flops to {{}}. {_PRINTED} operations per second",
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
    Key("timers.throughput.enabled", FLAG, "no effect", "step times are part of the engine's events"),
    Key("timers.throughput.synchronized", FLAG, "no effect", "step times are part of the engine's events"),
    Key(
        "wall_clock_breakdown",
        FLAG,
        "supported",
        f"whether to set monitor.timing to true. {_PRINTED} phases and waits",
        harmless=(False,),
    ),
    Key(
        "memory_breakdown",
        FLAG,
        "supported",
        f"whether to set monitor.memory to true. {_PRINTED} bytes by tier",
        harmless=(False,),
    ),
    Key("dump_state", FLAG, "no effect", "print(engine.config) shows the configuration", harmless=(False,)),
    Key(
        "log_level",
        or_null(TEXT),
        "no effect",
        "set the level with Python's logging module",
        harmless=(None,),
    ),
    Key(
        "disable_python_gc",
        FLAG,
        "no effect",
        "the engine does not change the garbage collector",
        harmless=(False,),
    ),
    Key("vocabulary_size", or_null(integer(1)), "no effect", "no feature depends on it", harmless=(None,)),
    Key(
        "disable_allgather",
        FLAG,
        "no effect",
        "parameters are always gathered with all-gather",
        harmless=(False,),
    ),
)

CHECKPOINT_KEYS = (
    Key(
        "checkpoint.tag_validation",
        choice("ignore", "warn", "fail"),
        "supported",
        "what to do when ranks save under different tags",
        "checkpoint.tag_validation",
    ),
    Key("checkpoint.load_universal", FLAG, "no effect", _ANY_LOADS, harmless=(False,)),
    Key(
        "checkpoint.use_node_local_storage",
        FLAG,
        "unsupported",
        "All ranks write below one shared directory. Save there",
        harmless=(False,),
    ),
    Key(
        "checkpoint.parallel_write.pipeline_stage",
        FLAG,
        "no effect",
        "every rank writes its own shards",
        harmless=(False,),
    ),
    Key(
        "checkpoint.checkpoint_serialization",
        FLAG,
        "no effect",
        "checkpoint files always have the format safetensors",
    ),
    Key(
        "checkpoint.writer", or_null(MAPPING), "no effect", "there is one checkpoint writer", harmless=(None,)
    ),
    Key(
        "datastates_ckpt",
        ANYTHING,
        "no effect",
        "use the native key checkpoint.async_save",
        harmless=(None, False),
    ),
)

_NOT_YET = "This feature does not exist here. Remove it"
_ACTIVATION = "activation_checkpointing"
_AT_CALLS = "calls of deepspeed.checkpointing.checkpoint and zero_ext.checkpoint_activations"


def _activation(name: str, value_type: ValueType, why: str, switch: str = "") -> Key:
    path = f"{_ACTIVATION}.{name}"
    return Key(path, value_type, "supported", why, path, switch=f"{_ACTIVATION}.{switch}" if switch else "")


ACTIVATION_KEYS = (
    _activation(
        "partition_activations",
        FLAG,
        f"whether to partition the inputs of {_AT_CALLS}. The group is that of "
        "deepspeed.checkpointing.configure(mpu)",
    ),
    _activation("cpu_checkpointing", FLAG, f"whether to store the inputs of {_AT_CALLS} in host memory"),
    _activation(
        "contiguous_memory_optimization",
        FLAG,
        f"whether to store the inputs of {_AT_CALLS} in one buffer, partitioned or not",
    ),
    _activation(
        "number_checkpoints",
        or_null(integer(1)),
        "largest number of calls with inputs in the buffer of contiguous_memory_optimization",
        "contiguous_memory_optimization",
    ),
    _activation(
        "synchronize_checkpoint_boundary",
        FLAG,
        f"whether to wait for the device before and after {_AT_CALLS}",
    ),
    _activation("profile", FLAG, f"whether to publish events to monitors for {_AT_CALLS}"),
)

ABSENT_KEYS = (
    Key("sequence_parallel_size", integer(1), "unsupported", _NOT_YET, harmless=(1,)),
    Key(
        "seq_parallel_communication_data_type",
        or_null(choice("fp32", "fp16", "bf16")),
        "no effect",
        "sequence parallelism sends tensors in their own dtype",
        harmless=(None,),
    ),
    Key("use_data_before_expert_parallelism", FLAG, "unsupported", _NOT_YET, harmless=(False,)),
    Key("graph_harvesting", FLAG, "unsupported", _NOT_YET, harmless=(False,)),
    *(
        _absent(section, _NOT_YET)
        for section in (
            "amp",
            "autotuning",
            "compression_training",
            "curriculum_learning",
            "data_efficiency",
            "eigenvalue",
            "elasticity",
            "expert_parallel",
            "hybrid_engine",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "weight_quantization",
        )
    ),
    Key(
        "compile",
        ANYTHING,
        "unsupported",
        "DeepCompile does not exist here. Remove the section and use torch.compile on the model's blocks",
        harmless=(None, False, {}),
    ),
    _absent(
        "pipeline",
        "Remove the section. Build the pipeline in the script, with deepspeed.pipe.PipelineModule (which "
        "has an argument activation_checkpoint_interval) or zero_ext.parallel.pipeline",
    ),
    Key(
        "tensor_parallel",
        ANYTHING,
        "unsupported",
        "Remove the section or set autotp_size to 1. Call zero_ext.parallel.apply_tensor_parallel in the "
        "script",
        harmless=(None, False, {}),
    ),
)

FEATURE_KEYS = REPORT_KEYS + CHECKPOINT_KEYS + ACTIVATION_KEYS + ABSENT_KEYS
