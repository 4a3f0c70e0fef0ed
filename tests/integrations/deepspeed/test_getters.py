"""Getters of the engine and of modules: what DeepSpeed's own return, or an error with the alternative."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.integrations.launch import ROOT, printed_by
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.name_registry import names

ACTIVATE = "from zero_ext.integrations.deepspeed import import_alias; import_alias.activate()\n"
MEMBERS = names().engines["DeepSpeedEngine"].split()
# Methods that do something, and objects.
OTHERS = (
    "backward coalesce_grad_reduction compile config data_parallel_group destroy empty_partition_cache eval "
    "forward load_checkpoint load_module_state_dict lr_scheduler module module_state_dict no_sync optimizer "
    "save_16bit_model save_checkpoint save_fp16_model scale set_gradient_accumulation_boundary step train "
    "training_dataloader zero_grad"
)
GROUPS = (
    "broadcast_src_rank data_parallel_group_ranks data_parallel_rank data_parallel_world_size "
    "model_parallel_world_size sequence_data_parallel_rank sequence_data_parallel_world_size "
    "sequence_parallel_rank sequence_parallel_world_size"
)
COMM = (
    "get_all_ranks_from_group get_local_rank get_local_rank_from_launcher get_rank "
    "get_world_rank_from_launcher get_world_size get_world_size_from_launcher has_all_gather_into_tensor "
    "has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor is_available is_initialized"
)
FUNCTIONS = [
    *(f"utils.groups._get_{name}" for name in GROUPS.split()),
    *(f"comm.{name}" for name in COMM.split()),
]

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
CPU = {"device": "cpu", "pin_memory": False}
STAGE_3_KEYS = {
    "stage3_prefetch_bucket_size": 11,
    "stage3_param_persistence_threshold": 3,
    "stage3_max_live_parameters": 12,
    "stage3_max_reuse_distance": 13,
    "stage3_module_granularity_threshold": 14,
    "stage3_allgather_sequential": True,
    "model_persistence_threshold": 15,
}
STAGE_2_KEYS = {
    "allgather_bucket_size": 16,
    "reduce_bucket_size": 17,
    "sub_group_size": 18,
    **dict.fromkeys(("log_trace_cache_warnings", "parameter_alignment", "round_robin_gradients"), True),
    **dict.fromkeys(("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "overlap_comm"), True),
    **dict.fromkeys(("allgather_partitions", "contiguous_gradients", "ignore_unused_parameters"), False),
    **dict.fromkeys(("load_from_fp32_weights", "reduce_scatter", "use_multi_rank_bucket_allreduce"), False),
}
FP16 = {"initial_scale_power": 4, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 2}
WARMUP = {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
FLOPS = {"profile_step": 3, "module_depth": 2, "top_modules": 4, "detailed": False, "output_file": "flops"}
REPORTS = {
    "steps_per_print": 100,
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state"), True),
    "log_level": "info",
    "flops_profiler": {"enabled": False, "recompute_fwd_factor": 1.0, **FLOPS},
    "checkpoint": {"tag_validation": "Fail", "load_universal": True, "checkpoint_serialization": False},
    "dataloader_drop_last": True,
    "managed_gradient_accumulation": False,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "no stage": {"gradient_clipping": 0.0},
    "bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "steps": {
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
    },
    "stage 2": {"zero_optimization": {"stage": 2, **STAGE_2_KEYS}},
    "stage 3": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": CPU,
            "offload_param": {**CPU, "buffer_count": 7},
            **STAGE_3_KEYS,
        },
    },
    "fp16": {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "auto_cast": True, "consecutive_hysteresis": True, **FP16},
    },
    "static": {
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True, "loss_scale": 8},
        "communication_data_type": "fp32",
    },
    "reports": {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.125, "weight_decay": 0.5, "torch_adam": True}},
        **REPORTS,
    },
}
OWN_DEFAULT = "the default is zero_ext's, and the value in force is returned"
BUG = "DeepSpeed's own raises or returns methods"
# What differs in some configuration, with the reason.
EXCEPTIONS = {
    "compile_zero_optimization_stage": BUG,
    "dynamic_loss_scale": "DeepSpeed returns True without fp16, where no loss is scaled",
    "get_batch_info": BUG,
    "get_data_parallel_rank": BUG,
    "get_data_types": "gradients are accumulated in fp32",
    "get_model_parallel_rank": BUG,
    "get_tensor_parallel_rank": BUG,
    "get_type": "DeepSpeed returns 0.0, since no param group has a type",
    "optimizer_params": "params without effect are left out",
    "zero_gather_16bit_weights_on_model_save": "full weights are always available",
    "zero_max_reuse_distance": OWN_DEFAULT,
    "zero_param_persistence_threshold": OWN_DEFAULT,
    "zero_prefetch_bucket_size": OWN_DEFAULT,
    "zero_reduce_bucket_size": OWN_DEFAULT,
    "comm.get_all_ranks_from_group": "DeepSpeed returns none of the world's ranks",
    "comm.has_all_reduce_coalesced": "the coalesced functions are unsupported",
    "comm.has_coalescing_manager": "the coalesced functions are unsupported",
}


def supported(engine: Any) -> list[str]:
    return [name for name in MEMBERS if hasattr(engine, name)]


@pytest.fixture(scope="module")
def engine() -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    return deepspeed.initialize(model=nn.Linear(4, 2), config=config)[0]


def test_getters_return_what_deepspeeds_own_return(engine: Any) -> None:
    members = [name for name in supported(engine) if name not in OTHERS.split()]
    assert len(members) > 110
    configs = {title: BASE | config for title, config in CONFIGS.items()}
    arguments = json.dumps({"configs": configs, "members": members, "functions": FUNCTIONS})
    code = (ROOT / "tests/integrations/deepspeed/scripts/getters.py").read_text()
    code = code.replace("from __future__ import annotations", "")
    theirs, ours = printed_by(code, arguments), printed_by(ACTIVATE + code, arguments)
    differences = {
        name: (title, wanted, ours[title][name])
        for title, answers in theirs.items()
        for name, wanted in answers.items()
        if ours[title][name] != (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted)
    }
    assert {name: each for name, each in differences.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() == differences.keys()
    errors = [name for answers in ours.values() for name, each in answers.items() if "Error:" in str(each)]
    assert errors == []


def test_a_member_that_is_not_supported_says_what_to_do(engine: Any) -> None:
    missing = [name for name in MEMBERS if name not in supported(engine)]
    assert len(missing) > 50 and not set(missing) & set(dir(engine))
    for name in missing:
        with pytest.raises(AttributeError, match=rf"engine\.{name}: it is not supported\. [A-Z]") as error:
            getattr(engine, name)
        assert isinstance(error.value, DeepSpeedFeatureError)
    assert getattr(engine, "tput_timer", None) is None
    with pytest.raises(DeepSpeedFeatureError, match=r"zero_ext\.sleep"):
        engine.offload_states()


def test_other_names_are_the_models_or_unknown(engine: Any) -> None:
    assert engine.in_features == 4
    with pytest.raises(AttributeError, match="set"):
        engine.gradient_average = False
    text = "gradient_cliping: expected an attribute of DeepSpeedEngine or of its model, Linear, got neither"
    with pytest.raises(AttributeError, match=text) as error:
        engine.gradient_cliping()
    assert error.value.name == "gradient_cliping" and not isinstance(error.value, DeepSpeedFeatureError)
    unfinished = type(engine).__new__(type(engine))  # as a subclass sees it before super().__init__()
    assert not hasattr(unfinished, "config") and not hasattr(unfinished, "in_features")
    engine.module.__class__ = type("Faulty", (nn.Linear,), {"broken": property(lambda self: self.absent)})
    with pytest.raises(AttributeError, match="'Faulty' object has no attribute 'broken'"):
        print(engine.broken)


def test_getters_read_the_configuration_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native configuration has other keys, and the environment changes what a JSON says."""
    native = {
        "stage": 3,
        "units": {"prefetch_elements": 5, "persistence_threshold": 2},
        "offload": {"optimizer": "host"},
        "communication": {"quantized_weights": "int8"},
        "monitor": {"timing": True, "memory": False, "jsonl": False},
    }
    engine, *_ = zero_ext.initialize(model=nn.Linear(4, 2), config=native)
    assert (engine.zero_prefetch_bucket_size(), engine.zero_param_persistence_threshold()) == (5, 2)
    assert engine.zero_quantized_weights() and engine.wall_clock_breakdown() and not engine.memory_breakdown()
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_offload_param() is None
    assert engine.zero_allgather_bucket_size() == 500_000_000 and engine.optimizer_name() == "adamw"
    monkeypatch.setenv("ZERO_EXT_CONFIG", "units.bucket_elements=99 offload.optimizer=host")
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "optimizer": {"type": "AdamW"}}
    engine, *_ = zero_ext.initialize(model=nn.Linear(4, 2), config=config)
    assert engine.zero_reduce_bucket_size() == 99
    assert engine.zero_cpu_offload() and engine.zero_offload_optimizer().device == "cpu"


def test_the_loss_scale_in_force_is_the_optimizers() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 4}, "optimizer": {"type": "AdamW"}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config)
    assert engine.loss_scale() == 0 and optimizer.loss_scale == 16
    assert engine.communication_data_type is torch.float16


def test_a_configuration_has_the_same_answers_as_attributes() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 12, "prefetch_bucket_size": 11}
    config = deepspeed.DeepSpeedConfig({"zero_optimization": zero, "dump_state": True})
    assert config.dump_state and not config.memory_breakdown and config.log_level is None
    section = config.zero_config
    assert (section.max_live_parameters, section.prefetch_bucket_size) == (12, 11)
