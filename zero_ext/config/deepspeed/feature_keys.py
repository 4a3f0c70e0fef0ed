"""DeepSpeed keys of checkpoints, logging, profiling, and of features that do not exist here."""

from __future__ import annotations

from .key import ANYTHING, FLAG, MAPPING, TEXT, Fate, Key, ValueType, choice, integer, or_null

_ANY_LOADS = "every checkpoint loads at any world size and stage"


def _switched(section: str, fate: Fate, why: str, fields: dict[str, ValueType]) -> tuple[Key, ...]:
    """Return a section with an `enabled` key: while that is false, the other keys are checked and ignored."""
    switch = f"{section}.enabled"
    return (
        Key(switch, FLAG, fate, why, harmless=(False,), auto=True),
        *(
            Key(f"{section}.{name}", kind, fate, f"with {switch}", auto=True, switch=switch)
            for name, kind in fields.items()
        ),
    )


def _absent(section: str, why: str) -> Key:
    """Return a whole section that is refused unless it is empty, null, false, or says enabled: false."""
    return Key(section, ANYTHING, "unsupported", why, harmless=(None, False, {}))


_LOGGING = "no writer exists here; use tensorboard, wandb or csv_monitor"
_RUN = {"output_path": TEXT, "job_name": TEXT}
_PRINTED = "the line of steps_per_print, every 10 steps when that is missing, reports"

REPORT_KEYS = (
    *_switched("tensorboard", "supported", "monitor.tensorboard becomes output_path/job_name", _RUN),
    *_switched("csv_monitor", "supported", "monitor.csv becomes output_path/job_name/steps.csv", _RUN),
    *_switched(
        "wandb",
        "supported",
        "monitor.wandb takes project, group, and team as entity",
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
    ),
    *_switched(
        "comms_logger",
        "supported",
        "monitor.comms becomes true: bytes and times of all collectives, in comms.jsonl",
        {"prof_all": FLAG, "prof_ops": ANYTHING, "verbose": FLAG, "debug": FLAG},
    ),
    *_switched(
        "flops_profiler",
        "supported",
        f"monitor.flops becomes {{}}; {_PRINTED} operations per second",
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
    ),
    Key("timers.throughput.enabled", FLAG, "no effect", "step times come with the engine's events"),
    Key("timers.throughput.synchronized", FLAG, "no effect", "step times come with the engine's events"),
    Key(
        "wall_clock_breakdown",
        FLAG,
        "supported",
        f"monitor.timing becomes true; {_PRINTED} phases and waits",
        harmless=(False,),
    ),
    Key(
        "memory_breakdown",
        FLAG,
        "supported",
        f"monitor.memory becomes true; {_PRINTED} bytes by tier",
        harmless=(False,),
    ),
    Key("dump_state", FLAG, "no effect", "print(engine.config) shows it", harmless=(False,)),
    Key("log_level", or_null(TEXT), "no effect", "set it with Python's logging module", harmless=(None,)),
    Key("disable_python_gc", FLAG, "no effect", "the garbage collector is left alone", harmless=(False,)),
    Key("vocabulary_size", or_null(integer(1)), "no effect", "nothing here depends on it", harmless=(None,)),
    Key("disable_allgather", FLAG, "no effect", "parameters always come by all-gather", harmless=(False,)),
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
        "every rank writes its own part",
        harmless=(False,),
    ),
    Key("checkpoint.checkpoint_serialization", FLAG, "no effect", "files are safetensors"),
    Key("checkpoint.writer", or_null(MAPPING), "no effect", "there is one writer", harmless=(None,)),
    Key(
        "datastates_ckpt",
        ANYTHING,
        "no effect",
        "use the native key checkpoint.async_save",
        harmless=(None, False),
    ),
)

_NOT_YET = "This feature does not exist here. Remove the section"
_ACTIVATION = "activation_checkpointing"
_AT_CALLS = "acts on calls of deepspeed.checkpointing.checkpoint and zero_ext.checkpoint_activations"


def _activation(name: str, value_type: ValueType, why: str, switch: str = "") -> Key:
    path = f"{_ACTIVATION}.{name}"
    return Key(path, value_type, "supported", why, path, switch=f"{_ACTIVATION}.{switch}" if switch else "")


ACTIVATION_KEYS = (
    _activation(
        "partition_activations",
        FLAG,
        f"{_AT_CALLS}; the group is that of deepspeed.checkpointing.configure(mpu)",
    ),
    _activation("cpu_checkpointing", FLAG, _AT_CALLS),
    _activation("contiguous_memory_optimization", FLAG, f"{_AT_CALLS}, partitioned or not"),
    _activation(
        "number_checkpoints",
        or_null(integer(1)),
        "with contiguous_memory_optimization",
        "contiguous_memory_optimization",
    ),
    _activation("synchronize_checkpoint_boundary", FLAG, _AT_CALLS),
    _activation("profile", FLAG, f"{_AT_CALLS}: monitors get an event of each"),
)

ABSENT_KEYS = (
    Key("sequence_parallel_size", integer(1), "unsupported", _NOT_YET, harmless=(1,)),
    Key(
        "seq_parallel_communication_data_type",
        or_null(choice("fp32", "fp16", "bf16")),
        "no effect",
        "sequences over ranks travel in the dtype that they have",
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
        "The script builds pipelines, with deepspeed.pipe.PipelineModule (activation_checkpoint_interval is "
        "an argument of it) or zero_ext.parallel.pipeline. Remove the section",
    ),
    Key(
        "tensor_parallel",
        ANYTHING,
        "unsupported",
        "The script calls zero_ext.parallel.apply_tensor_parallel. Remove the section or set autotp_size "
        "to 1",
        harmless=(None, False, {}),
    ),
)

FEATURE_KEYS = REPORT_KEYS + CHECKPOINT_KEYS + ACTIVATION_KEYS + ABSENT_KEYS
