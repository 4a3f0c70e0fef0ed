"""Differences of supported names of DeepSpeed, and alternatives for unsupported ones.

Keys are patterns of full names as fnmatch reads them. The first that fits counts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_COLLECTIVE = "a collective, at every stage and tier"
_FULL_STATE = f"{_COLLECTIVE}, whatever stage3_gather_16bit_weights_on_model_save says"
_RANDOM = "random numbers of the accelerator, or of the CPU where there is none"
_FOR_ISINSTANCE = "for isinstance alone"
_ENGINE, _PIPELINE = "deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"

DIFFERENCES: dict[str, str] = {
    "deepspeed.initialize": "mpu and mesh_param raise; without an optimizer the engine only runs the model",
    "deepspeed.init_distributed": "gloo, and NCCL alongside it where there is CUDA",
    "deepspeed.DeepSpeedConfig*": "unknown keys are errors",
    f"{_ENGINE}.no_sync": "allowed at every stage",
    f"{_ENGINE}.coalesce_grad_reduction": "allowed at every stage",
    f"{_ENGINE}.save_checkpoint": "zero_ext's format under global_step{N}, committed by one rename; "
    "client_state is JSON or tensors; frozen parameters are always saved",
    f"{_ENGINE}.load_checkpoint": "any world size and stage; custom_load_fn and a load without optimizer "
    "states raise",
    f"{_ENGINE}.save_*_model": _FULL_STATE,
    f"{_ENGINE}.*module_state_dict": _FULL_STATE,
    f"{_ENGINE}.get_global_grad_norm": "None before the first step, and without clipping or fp16",
    f"{_ENGINE}.zero_gather_16bit_*": "always True: whole weights can be had",
    f"{_ENGINE}.destroy": "nothing to do: memory goes with the model",
    f"{_ENGINE}.compile": "raises: compile the model's blocks before initialize",
    "deepspeed.comm.*": "torch.distributed's; prof, log_name and debug are taken and ignored",
    "deepspeed.zero.Init": 'values "auto" do not matter; tiers as offload_param says',
    "deepspeed.zero.GatheredParameters": "a write without modifier_rank raises instead of being dropped",
    "deepspeed.zero.register_external_parameter": "nothing to do: reads gather",
    "deepspeed.zero.TiledLinear": "its state dict is the plain layer's",
    "*.DeepSpeedZeroOptimizer*": _FOR_ISINSTANCE,
    "*.ZeROOptimizer": _FOR_ISINSTANCE,
    "deepspeed.DeepSpeedOptimizer": _FOR_ISINSTANCE,
    "*.ZeroParam[ST]*": "for ds_status of parameters in stage 3",
    "*.estimate_zero*": "with the bytes that this engine keeps",
    "deepspeed.ops.adam.*Adam": "makes torch's AdamW or Adam, run fused",
    "deepspeed.ops.lamb.FusedLamb": "makes zero_ext.Lamb",
    "deepspeed.ops.lion.*Lion": "makes zero_ext.Lion",
    "deepspeed.ops.adagrad.*Adagrad": "makes torch's Adagrad",
    "deepspeed.*.AsyncIOBuilder": "short transfers go on, errors raise with path and reason",
    "*.installed_ops": "what zero_ext serves, which needs no build",
    "deepspeed.runtime.lr_schedules.[WOL]*": "a torch scheduler; DeepSpeed's state loads",
    "*.partition_balanced": "the heaviest part is as light as can be",
    "deepspeed.utils.safe_?et_full_*": _COLLECTIVE,
    "deepspeed.utils.safe_?et_local_*": "flat, what this rank owns",
    "deepspeed.utils.*z3_leaf*": "before initialize",
    "deepspeed.utils.get_*parallel*": "all ranks are data-parallel; a pipeline has its groups in module.mesh",
    "deepspeed.checkpointing.configure": "inputs need not be partitioned to be kept on the CPU or in one "
    "buffer; partitioning needs mpu",
    "deepspeed.checkpointing.*checkpoint": "zero_ext.checkpoint_activations; never reentrant",
    "deepspeed.checkpointing.reset": "buffers empty themselves",
    "deepspeed.checkpointing.*rng*": _RANDOM,
    "deepspeed.checkpointing.model_parallel_*": _RANDOM,
    "deepspeed.utils.zero_to_fp32.*": "of folders that DeepSpeed or zero_ext wrote; overwrites no weights",
    "deepspeed.PipelineModule": "in every ZeRO stage; parameters are named layers.<number>...; the heaviest "
    "stage is as light as can be; axes 'pipe' and 'data'; seed_layers, seed_fn and an "
    "activation_checkpoint_func raise",
    "deepspeed.pipe.LayerSpec": "values depend on torch's seed and the layer's number alone",
    "deepspeed.pipe.TiedLayerSpec": "shares all parameters, whatever tied_weight_attr names",
    _PIPELINE: "what initialize returns for a PipelineModule",
    **dict.fromkeys(
        (
            f"{_PIPELINE}.{name}"
            for name in ("forward", "backward", "step", "*_sync", "*_grad_*", "set_grad*")
        ),
        "raises: a pipeline runs whole batches; call train_batch or eval_batch",
    ),
    f"{_PIPELINE}.train_batch": "data that ends or does not fit on one rank is an error on all",
    f"{_PIPELINE}.eval_batch": "the loss is on all ranks, whatever bcast_loss says; reduce_output 'avg' for "
    "losses, None for outputs (compute_loss=False); num_micro_batches is that of a step",
    f"{_PIPELINE}.*checkpoint": "of one model: loads with any number of stages, ranks and any ZeRO stage",
    "*.DEEPSPEED_ENVIRONMENT_NAME": "DeepSpeed's launcher alone reads that file",
    "deepspeed.monitor.*": "rank 0 writes",
    "deepspeed.accelerator.*": "the CPU or CUDA",
}

_DUAL = "zero_ext.parallel.pipeline.PipelineModule(..., schedule='zbv') and 'zero_bubble' fill bubbles so"
_INFERENCE = "no inference engine here; zero_ext.prepare(model, None, config) runs what exceeds the device"
_TENSOR = "not by this name: split with zero_ext.parallel.apply_tensor_parallel before prepare"
_SEQUENCE = "zero_ext.integrations.apply_sequence_parallel puts sequences over ranks"
_EXPERTS = (
    "experts on different ranks are zero_ext.parallel.experts.MixtureOfExperts here, on the axis 'ep' of "
    "zero_ext.parallel.make_mesh; for a model's own layers use deepspeed.utils.set_z3_leaf_modules"
)
_COUNTED = "the engine always counts the bytes it sends: zero_ext.zero.engine_of(engine).traffic"
_CONFIG = "read the attributes of deepspeed.DeepSpeedConfig(json), or the JSON itself"

REASONS: dict[str, str] = {
    "deepspeed.autotuning*": "use 'zero-ext plan' and 'zero-ext tune'",
    "deepspeed.compile*": "DeepCompile does not exist here: compile the model's blocks before initialize",
    "deepspeed.io*": "use deepspeed.ops.aio, or torch.save",
    "deepspeed.launcher*": "start with 'zero-ext run --deepspeed-compat', accelerate launch or torchrun",
    "deepspeed.linear*": "use PEFT's LoRA; frozen weights are sharded and offloaded as they are",
    "deepspeed.moe*": _EXPERTS,
    "*expert*": _EXPERTS,
    "deepspeed.nvme*": "measure devices with 'zero-ext bench-nvme'",
    "deepspeed.profiling*": "set flops_profiler in the JSON, or use torch.profiler with_flops=True",
    "deepspeed.sequence*": _SEQUENCE,
    "*sequence_parallel*": _SEQUENCE,
    "*[dD]ual[pP]ipe[vV]*": _DUAL,
    "*.PipelineParallelGrid*": "the module's mesh, a DeviceMesh of torch, has groups and ranks: "
    "module.mesh['dp'].get_group()",
    "deepspeed.runtime.pipe.schedule*": "zero_ext.parallel.pipeline.PipelineModule takes a schedule by name",
    "deepspeed.comm.*_coalesced": "use torch.distributed's functions tensor by tensor",
    "deepspeed.comm.comm.mpi_discovery": "start with torchrun, which sets the environment",
    "deepspeed.comm*log*": _COUNTED,
    "deepspeed.comm.comm.configure": _COUNTED,
    "*.TiledLinearReturnBias": "use deepspeed.zero.TiledLinear(..., bias=False) and add the bias outside",
    "deepspeed.runtime.zero.linear*": "use torch.nn.Linear: sharded weights are gathered again in backward",
    "deepspeed.runtime.zero.leaf_module_config*": "write zero_optimization.leaf_module in the JSON, or call "
    "deepspeed.utils.set_z3_leaf_modules",
    "*[zZ]en[fF]low*": "split optimizer steps do not exist here; offload.update_mode 'delayed' overlaps the "
    "update with the next step",
    "*.GDSBuilder": "such transfers are the engine's own: set aio.use_gds",
    "deepspeed.ops.op_builder*": "nothing has to be built: use the optimizer classes and zero_ext.ops",
    "deepspeed.ops.fp_quantizer*": "quantize with torchao",
    "deepspeed.ops.[dt]*": _INFERENCE,
    "deepspeed.*inference*": _INFERENCE,
    "deepspeed.module_inject*": _INFERENCE,
    "deepspeed.model_implementations*": _INFERENCE,
    "deepspeed.runtime.hybrid_engine*": _INFERENCE,
    "*HybridEngine*": _INFERENCE,
    "deepspeed.runtime.data_pipeline*": "no curriculum learning here: choose samples in the data set",
    "deepspeed.runtime.comm*": "its collectives belong to optimizers here: use zero_ext.OneBitAdam",
    "deepspeed.*tensor_parallel*": _TENSOR,
    "deepspeed.*model_parallel*": _TENSOR,
    "deepspeed.tp_model_init": _TENSOR,
    "deepspeed.runtime.lr_schedules.*": "write the 'scheduler' section in the JSON",
    "deepspeed.runtime.dataloader.*": "pass training_data to initialize",
    "deepspeed.runtime.config.*Writer": "a JSON is written with json.dump, checked by initialize",
    "deepspeed.runtime.*config*": _CONFIG,
    "deepspeed.monitor.comet*": "use csv_monitor, tensorboard or wandb",
    "deepspeed.utils.numa*": "bind ranks with torchrun --numa-binding or numactl",
    "*.clip_grad_norm_": "write gradient_clipping in the JSON: gradients are sharded over ranks",
    "deepspeed.utils.tensor_fragment.safe_*": "use safe_get_full_grad and safe_set_full_grad, or param.grad",
    "deepspeed.utils.nvtx*": "use torch.profiler.record_function",
    "*": "it is DeepSpeed's own machinery, which zero_ext replaces as a whole",
}


def difference_of(path: str) -> str:
    """Return what differs in a name that is served; empty if nothing does."""
    return _first(DIFFERENCES, path) or ""


def reason_of(path: str) -> str:
    """Why a name is not served, by where DeepSpeed defines it."""
    return _first(REASONS, path) or ""


def _first(notes: dict[str, str], path: str) -> str | None:
    return next((note for pattern, note in notes.items() if fnmatchcase(path, pattern)), None)
