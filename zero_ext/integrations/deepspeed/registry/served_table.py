"""Names of DeepSpeed that are served, and what differs."""

from __future__ import annotations

from zero_ext.integrations.deepspeed.registry.entry import Entry, served

_ENGINE = "deepspeed.DeepSpeedEngine"
_PIPELINE_ENGINE = "deepspeed.PipelineEngine"
_AT_EVERY_STAGE = "a collective, at every stage and tier"
_CHECKED = "every result is checked: short transfers go on, errors raise with path and reason"
_TORCH = "torch.distributed's; prof, log_name and debug are taken and ignored"

SERVED: tuple[Entry, ...] = (
    *served(
        "deepspeed",
        "initialize",
        "mpu and mesh_param raise; without an optimizer the engine only runs the model",
    ),
    *served("deepspeed", "init_distributed", "gloo, and NCCL beside it where there is CUDA"),
    *served("deepspeed", "add_config_arguments get_accelerator log_dist logger OnDevice"),
    *served("deepspeed", "DeepSpeedConfig DeepSpeedConfigError", "unknown keys are errors"),
    *served("deepspeed", "DeepSpeedEngine"),
    *served(_ENGINE, "forward backward step scale zero_grad train eval"),
    *served(_ENGINE, "no_sync coalesce_grad_reduction", "allowed at every stage"),
    *served(_ENGINE, "is_gradient_accumulation_boundary set_gradient_accumulation_boundary was_step_applied"),
    *served(
        _ENGINE,
        "save_checkpoint",
        "zero_ext's format under global_step{N}, committed by one rename; client_state is JSON or tensors; "
        "frozen parameters are always saved",
    ),
    *served(
        _ENGINE,
        "load_checkpoint",
        "any world size and stage; without optimizer states and custom_load_fn raise",
    ),
    *served(
        _ENGINE,
        "save_16bit_model save_fp16_model module_state_dict load_module_state_dict",
        f"{_AT_EVERY_STAGE}, whatever stage3_gather_16bit_weights_on_model_save says",
    ),
    *served(_ENGINE, "get_global_grad_norm", "None before the first step and without clipping or fp16"),
    *served(
        _ENGINE,
        "get_lr get_mom get_type module optimizer lr_scheduler training_dataloader device config "
        "global_steps global_samples micro_steps skipped_steps world_size dp_world_size global_rank "
        "local_rank data_parallel_group get_data_parallel_rank get_model_parallel_rank loss_scale "
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps get_batch_info "
        "zero_optimization zero_optimization_stage zero_optimization_partition_gradients "
        "zero_optimization_partition_weights gradient_clipping fp16_enabled bfloat16_enabled "
        "get_data_types dynamic_loss_scale steps_per_print optimizer_name optimizer_params "
        "scheduler_name scheduler_params zero_offload_optimizer zero_offload_param zero_cpu_offload "
        "empty_partition_cache",
    ),
    *served(_ENGINE, "zero_gather_16bit_weights_on_model_save", "always True: whole weights can be had"),
    *served(_ENGINE, "destroy", "nothing to do: memory goes with the model"),
    *served(_ENGINE, "compile", "raises: compile the model's blocks before initialize"),
    *served(
        "deepspeed.comm",
        "all_reduce inference_all_reduce all_gather all_gather_object all_gather_into_tensor allgather_fn "
        "all_to_all all_to_all_single barrier monitored_barrier batch_isend_irecv broadcast "
        "broadcast_object_list gather scatter reduce reduce_scatter reduce_scatter_tensor "
        "reduce_scatter_fn send recv isend irecv",
        _TORCH,
    ),
    *served(
        "deepspeed.comm",
        "init_distributed destroy_process_group new_group is_initialized is_available get_rank "
        "get_world_size get_local_rank get_global_rank get_world_group get_all_ranks_from_group "
        "initialize_mesh_device has_all_gather_into_tensor has_reduce_scatter_tensor ReduceOp ProcessGroup "
        "P2POp",
    ),
    *served("deepspeed.zero", "Init", 'values "auto" do not matter; tiers as offload_param says'),
    *served(
        "deepspeed.zero",
        "GatheredParameters",
        "a write without modifier_rank raises instead of being dropped",
    ),
    *served("deepspeed.zero", "register_external_parameter", "nothing to do: reads gather"),
    *served("deepspeed.zero", "TiledLinear", "its state dict is the plain layer's"),
    *served("deepspeed.zero", "unwrap_model_for_generation"),
    *served("deepspeed.zero", "DeepSpeedZeroOptimizer DeepSpeedZeroOptimizer_Stage3", "for isinstance alone"),
    *served("deepspeed.zero", "ZeroParamStatus ZeroParamType", "for ds_status of parameters in stage 3"),
    *served(
        "deepspeed.zero",
        "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero2_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs "
        "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
        "with the bytes that this engine keeps",
    ),
    *served("deepspeed.ops.adam", "DeepSpeedCPUAdam FusedAdam", "make torch's AdamW or Adam, run fused"),
    *served("deepspeed.ops.lamb", "FusedLamb", "makes zero_ext.Lamb"),
    *served("deepspeed.ops.adam", "OnebitAdam", "makes zero_ext.OneBitAdam"),
    *served("deepspeed.ops.adam", "ZeroOneAdam", "makes zero_ext.ZeroOneAdam"),
    *served("deepspeed.ops.lamb", "OnebitLamb", "makes zero_ext.OneBitLamb"),
    *served("deepspeed.ops.lion", "DeepSpeedCPULion FusedLion", "make zero_ext.Lion"),
    *served("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", "makes torch's Adagrad"),
    *served("deepspeed.ops.aio", "AsyncIOBuilder aio_handle aio_read aio_write", _CHECKED),
    *served(
        "deepspeed.runtime.lr_schedules",
        "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
        "torch schedulers; DeepSpeed's state loads",
    ),
    *served(
        "deepspeed.runtime.lr_schedules",
        "VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
        "get_lr_from_config",
    ),
    *served(
        "deepspeed.runtime.config",
        "DeepSpeedConfig DeepSpeedConfigError DeepSpeedZeroConfig DeepSpeedZeroOffloadParamConfig "
        "DeepSpeedZeroOffloadOptimizerConfig ZeroStageEnum OffloadDeviceEnum",
    ),
    *served("deepspeed.runtime.dataloader", "RepeatingLoader"),
    *served(
        "deepspeed.utils",
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state",
        _AT_EVERY_STAGE,
    ),
    *served(
        "deepspeed.utils",
        "safe_get_local_fp32_param safe_get_local_optimizer_state safe_set_local_fp32_param "
        "safe_set_local_optimizer_state",
        "flat, what this rank owns",
    ),
    *served(
        "deepspeed.utils",
        "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix set_z3_leaf_module "
        "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module",
        "before initialize",
    ),
    *served(
        "deepspeed.utils",
        "logger log_dist log_dist_once set_log_level_from_string see_memory_usage OnDevice RepeatingLoader",
    ),
    *served(
        "deepspeed.utils.groups",
        "get_data_parallel_group get_data_parallel_world_size get_data_parallel_rank "
        "get_model_parallel_world_size get_tensor_model_parallel_world_size",
        "all ranks are data-parallel; a pipeline has its groups in module.mesh",
    ),
    *served(
        "deepspeed.checkpointing",
        "configure partition_activations_in_checkpoint set_num_layers",
        "inputs need not be partitioned to lie on the CPU or in one buffer; partitioning needs mpu",
    ),
    *served(
        "deepspeed.checkpointing",
        "checkpoint non_reentrant_checkpoint",
        "zero_ext.checkpoint_activations; never reentrant",
    ),
    *served("deepspeed.checkpointing", "is_configured reset", "buffers empty themselves"),
    *served(
        "deepspeed.checkpointing",
        "get_cuda_rng_tracker CudaRNGStatesTracker model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed",
        "random numbers of the accelerator, or of the CPU where there is none",
    ),
    *served("deepspeed.launcher.runner", "DEEPSPEED_ENVIRONMENT_NAME", "its launcher alone reads the file"),
    *served("deepspeed.checkpoint.utils", "clone_tensors_for_torch_save"),
    *served(
        "deepspeed.utils.zero_to_fp32",
        "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict LazyTensor main",
        "of zero_ext's checkpoints and of DeepSpeed's; output that is there already is not overwritten",
    ),
    *served(
        "deepspeed.utils.zero_to_fp32",
        "get_model_state_file get_optim_files",
        "of zero_ext's checkpoints, files in memory without tensors",
    ),
    *(
        entry
        for module in ("deepspeed", "deepspeed.pipe")
        for entry in served(
            module,
            "PipelineModule",
            "in every ZeRO stage; parameters are named layers.<number>...; the heaviest stage is as light as "
            "can be; axes 'pipe' and 'data'; seed_layers, seed_fn and an activation_checkpoint_func raise",
        )
    ),
    *served("deepspeed.pipe", "LayerSpec", "values depend on torch's seed and the layer's number alone"),
    *served("deepspeed.pipe", "TiedLayerSpec", "shares all parameters, whatever tied_weight_attr names"),
    *served("deepspeed.runtime.pipe.module", "PipelineError"),
    *served("deepspeed", "PipelineEngine", "what initialize returns for a PipelineModule"),
    *served(
        _PIPELINE_ENGINE,
        "train_batch set_dataiterator set_dataloader set_batch_fn is_first_stage is_last_stage num_stages "
        "stage_id get_pipeline_parallel_rank micro_batches micro_batch_size",
        "data that ends or does not fit on one rank is an error on all",
    ),
    *served(
        _PIPELINE_ENGINE,
        "eval_batch",
        "the loss is on all ranks, whatever bcast_loss says; reduce_output 'avg' for losses, None for "
        "outputs (compute_loss=False); num_micro_batches is that of a step",
    ),
    *served(_PIPELINE_ENGINE, "forward backward step", "raise, as there: call train_batch or eval_batch"),
    *served(
        _PIPELINE_ENGINE,
        "no_sync set_gradient_accumulation_boundary save_16bit_model",
        "raise: a step is a batch, and no rank has all weights; 'zero-ext export' writes a checkpoint's",
    ),
    *served(_PIPELINE_ENGINE, "module_state_dict load_module_state_dict", "of this rank's layers"),
    *served(
        _PIPELINE_ENGINE,
        "save_checkpoint load_checkpoint",
        "of one model: loads with any number of stages, ranks and any ZeRO stage",
    ),
    *served(
        "deepspeed.pipe.topology",
        "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology",
        "every question about coordinates and ranks",
    ),
    *served(
        "deepspeed.monitor",
        "MonitorMaster Monitor csvMonitor TensorBoardMonitor WandbMonitor",
        "rank 0 writes",
    ),
    *served(
        "deepspeed.accelerator",
        "get_accelerator DeepSpeedAccelerator",
        "the CPU or CUDA; device, stream, memory and random number questions",
    ),
)
