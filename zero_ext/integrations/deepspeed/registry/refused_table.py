"""Names of DeepSpeed that are not served, and what to do instead."""

from __future__ import annotations

from zero_ext.integrations.deepspeed.registry.entry import Entry, refused

_DUAL = "zero_ext.parallel.pipeline.PipelineModule(..., schedule='zbv') and 'zero_bubble' fill bubbles so"
_GRID = "the module's mesh, a DeviceMesh of torch, has groups and ranks: module.mesh['dp'].get_group()"
_INFERENCE = "no inference engine here; zero_ext.prepare(model, None, config) runs what exceeds the device"
_TENSOR = "not by this name: split with zero_ext.parallel.split_tensors before prepare"
_SEQUENCE = "zero_ext.integrations.split_sequence puts sequences over ranks"
_EXPERTS = "expert parallelism is the axis 'ep' of zero_ext.parallel.make_mesh here"
_LAUNCH = "start with 'zero-ext run --deepspeed-compat'"
_COUNTED = "the engine always counts the bytes it sends: zero_ext.zero.engine_of(engine).wire"
_ZENFLOW = (
    "split optimizer steps do not exist here; offload.step 'delayed' overlaps the update with the next step"
)
_TUNE = "write the 'scheduler' section in the JSON"

REFUSED: tuple[Entry, ...] = (
    *refused("deepspeed", "DualPipeVModule DualPipeVEngine", _DUAL),
    *refused(
        "deepspeed",
        "init_inference InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine add_tuning_arguments "
        "default_inference_config replace_transformer_layer revert_transformer_layer "
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig module_inject",
        _INFERENCE,
    ),
    *refused("deepspeed", "tp_model_init set_autotp_mode", _TENSOR),
    *refused("deepspeed.launcher.runner", "main parse_args fetch_hostfile", _LAUNCH),
    *refused("deepspeed.pipe", "DualPipeVModule", _DUAL),
    *refused("deepspeed.pipe.topology", "PipelineParallelGrid", _GRID),
    *refused(
        "deepspeed.comm",
        "log_summary reset_log configure has_comm_data get_comm_operation_count get_logged_comm_ops",
        _COUNTED,
    ),
    *refused(
        "deepspeed.comm",
        "all_gather_coalesced all_reduce_coalesced",
        "use torch.distributed's functions tensor by tensor",
    ),
    *refused("deepspeed.comm", "mpi_discovery", "start with torchrun, which sets the environment"),
    *refused(
        "deepspeed.zero",
        "TiledLinearReturnBias",
        "use deepspeed.zero.TiledLinear(..., bias=False) and add the bias outside",
    ),
    *refused("deepspeed.zero", "DeepSpeedZeRoOffload", "it is DeepSpeed's own machinery"),
    *refused("deepspeed.ops", "transformer DeepSpeedTransformerLayer DeepSpeedTransformerConfig", _INFERENCE),
    *refused("deepspeed.ops", "fp_quantizer", "quantize with torchao"),
    *refused(
        "deepspeed.ops.adam", "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3", _ZENFLOW
    ),
    *refused("deepspeed.ops.aio", "GDSBuilder", "such transfers are the engine's own: set aio.use_gds"),
    *refused(
        "deepspeed.ops.aio",
        "CPUAdamBuilder FusedAdamBuilder CPULionBuilder FusedLionBuilder CPUAdagradBuilder FusedLambBuilder",
        "nothing has to be built: use the optimizer classes",
    ),
    *refused("deepspeed.ops.aio", "UtilsBuilder InferenceBuilder TransformerBuilder", _INFERENCE),
    *refused(
        "deepspeed.runtime.lr_schedules",
        "add_tuning_arguments parse_arguments override_params get_config_from_args",
        _TUNE,
    ),
    *refused("deepspeed.runtime.dataloader", "DeepSpeedDataLoader", "pass training_data to initialize"),
    *refused(
        "deepspeed.runtime.config",
        "DeepSpeedConfigWriter",
        "a JSON is written with json.dump, checked by initialize",
    ),
    *refused("deepspeed.runtime.config", "HybridEngineConfig", _INFERENCE),
    *refused("deepspeed.monitor", "CometMonitor", "use csv_monitor, tensorboard or wandb"),
    *refused(
        "deepspeed.utils",
        "safe_get_local_grad safe_set_local_grad safe_update_full_grad_vectorized",
        "use safe_get_full_grad and safe_set_full_grad, or param.grad",
    ),
    *refused("deepspeed.utils", "instrument_w_nvtx", "use torch.profiler.record_function"),
    *refused("deepspeed.utils.groups", "initialize _get_expert_parallel_group", _EXPERTS),
    *refused("deepspeed.utils.groups", "_get_sequence_parallel_group", _SEQUENCE),
    *refused("deepspeed.utils.groups", "get_tensor_model_parallel_group get_model_parallel_group", _TENSOR),
)
