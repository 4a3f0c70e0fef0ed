"""DeepSpeed's modules: where each one's names are found here, and those that are refused whole."""

from __future__ import annotations

_HERE = "zero_ext.integrations.deepspeed"

# Its modules by the module here that has their names.
_LOCAL = {
    "deepspeed": "",
    "deepspeed.accelerator": ".accelerator",
    "deepspeed.accelerator.real_accelerator": ".accelerator",
    "deepspeed.checkpointing": ".checkpointing",
    "deepspeed.checkpoint": ".saved_tensors",
    "deepspeed.checkpoint.utils": ".saved_tensors",
    "deepspeed.comm": ".comm",
    "deepspeed.comm.comm": ".comm",
    "deepspeed.launcher": ".launcher",
    "deepspeed.launcher.runner": ".launcher",
    "deepspeed.monitor": ".monitor",
    "deepspeed.monitor.csv_monitor": ".monitor",
    "deepspeed.monitor.monitor": ".monitor",
    "deepspeed.monitor.tensorboard": ".monitor",
    "deepspeed.monitor.wandb": ".monitor",
    "deepspeed.ops": ".ops",
    "deepspeed.ops.adagrad": ".ops.adagrad",
    "deepspeed.ops.adam": ".ops.adam",
    "deepspeed.ops.adam.cpu_adam": ".ops.adam",
    "deepspeed.ops.adam.fused_adam": ".ops.adam",
    "deepspeed.ops.aio": ".ops.aio",
    "deepspeed.ops.lamb": ".ops.lamb",
    "deepspeed.ops.lion": ".ops.lion",
    "deepspeed.ops.op_builder": ".ops.aio",
    "deepspeed.pipe": ".pipe",
    "deepspeed.pipe.topology": ".topology",
    "deepspeed.runtime": ".runtime",
    "deepspeed.runtime.activation_checkpointing": ".checkpointing",
    "deepspeed.runtime.activation_checkpointing.checkpointing": ".checkpointing",
    "deepspeed.runtime.config": ".runtime.config",
    "deepspeed.runtime.dataloader": ".runtime.dataloader",
    "deepspeed.runtime.engine": ".engine",
    "deepspeed.runtime.lr_schedules": ".runtime.lr_schedules",
    "deepspeed.runtime.pipe": ".pipe",
    "deepspeed.runtime.pipe.engine": ".pipe.engine",
    "deepspeed.runtime.pipe.module": ".pipe.module",
    "deepspeed.runtime.pipe.topology": ".topology",
    "deepspeed.runtime.utils": ".utils.logging",
    "deepspeed.runtime.zero": ".zero",
    "deepspeed.runtime.zero.config": ".runtime.config",
    "deepspeed.runtime.zero.offload_config": ".runtime.config",
    "deepspeed.runtime.zero.partition_parameters": ".zero",
    "deepspeed.runtime.zero.stage3": ".zero",
    "deepspeed.runtime.zero.stage_1_and_2": ".zero",
    "deepspeed.runtime.zero.tiling": ".zero",
    "deepspeed.utils": ".utils",
    "deepspeed.utils.groups": ".utils.groups",
    "deepspeed.utils.logging": ".utils.logging",
    "deepspeed.utils.tensor_fragment": ".utils",
    "deepspeed.utils.z3_leaf_module": ".utils",
    "deepspeed.utils.zero_to_fp32": ".checkpoint_weights",
    "deepspeed.zero": ".zero",
}
MODULES: dict[str, str] = {name: _HERE + local for name, local in _LOCAL.items()}

_EXPERTS = (
    "experts on different ranks are zero_ext.parallel.experts.MixtureOfExperts here; for a model's own "
    "layers use deepspeed.utils.set_z3_leaf_modules"
)
_INFERENCE = (
    "no inference engine here: zero_ext.prepare(model, None, config) runs models larger than the device"
)
_TUNING = "use 'zero-ext plan' and 'zero-ext tune'"
_DUAL = "zero_ext.parallel.pipeline has the schedules 'zbv' and 'zero_bubble'"
_LAUNCH = "start with 'zero-ext run --deepspeed-compat', or with accelerate launch or torchrun"
_SEQUENCE = "zero_ext.integrations.split_sequence puts sequences over ranks"
_OWN = "it is DeepSpeed's own machinery"
REFUSED_MODULES: dict[str, str] = {
    "deepspeed.autotuning": _TUNING,
    "deepspeed.compile": "DeepCompile does not exist here: compile the model's blocks before initialize",
    "deepspeed.compression": "there is no compression of models here: quantize with torchao before training",
    "deepspeed.elasticity": "every checkpoint loads at any world size; restart with torchrun",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.io": "use deepspeed.ops.aio, or torch.save",
    "deepspeed.launcher.launch": _LAUNCH,
    "deepspeed.launcher.multinode_runner": _LAUNCH,
    "deepspeed.linear": "use PEFT's LoRA; frozen weights are sharded and offloaded as they are",
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": _EXPERTS,
    "deepspeed.nvme": "measure devices with 'zero-ext bench-nvme'",
    "deepspeed.ops.sparse_attention": "take zero_ext.attention.SparseSelfAttention",
    "deepspeed.ops.transformer": _INFERENCE,
    "deepspeed.profiling": "set flops_profiler in the JSON, or use torch.profiler with_flops=True",
    "deepspeed.runtime.bf16_optimizer": _OWN,
    "deepspeed.runtime.comm": "its collectives belong to optimizers here: use OnebitAdam or ZeroOneAdam",
    "deepspeed.runtime.data_pipeline": "no curriculum learning here: choose samples in the data set",
    "deepspeed.runtime.fp16": _OWN,
    "deepspeed.runtime.hybrid_engine": _INFERENCE,
    "deepspeed.runtime.pipe.dualpipev": _DUAL,
    "deepspeed.runtime.pipe.p2p": _OWN,
    "deepspeed.runtime.pipe.schedule": _OWN,
    "deepspeed.runtime.sequence_parallel": _SEQUENCE,
    "deepspeed.runtime.swap_tensor": _OWN,
    "deepspeed.runtime.tensor_parallel": "split with zero_ext.parallel.split_tensors before prepare",
    "deepspeed.sequence": _SEQUENCE,
}
