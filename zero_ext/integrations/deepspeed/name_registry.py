"""The names of DeepSpeed's modules, as scripts/deepspeed_names.py read them from its sources, and the modules
here that serve them, with notes on what differs and what is unsupported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from zero_ext.config.optimizer_traits import OPTIMIZERS, TORCH

ROOT = "deepspeed"
FILE = Path(__file__).with_name("names.json")
_PACKAGE = "zero_ext.integrations.deepspeed"
_DEEPSPEEDS = tuple(traits for traits in OPTIMIZERS.values() if traits.deepspeed_builders)
# The modules here, in the order in which they are searched, for DeepSpeed's modules and those inside them.
_SERVED_BY = {
    "accelerator": ("deepspeed_accelerator",),
    "checkpoint.utils": ("checkpoint_io.checkpoint_weights",),
    "comm": ("deepspeed_comm",),
    "git_version_info": ("deepspeed_accelerator",),
    "launcher": ("deepspeed_comm",),
    "monitor": ("deepspeed_reports",),
    "ops": ("deepspeed_accelerator",),
    **{f"ops.{traits.name.lower()}": ("optimizer_types",) for traits in _DEEPSPEEDS},
    "ops.aio": ("deepspeed_aio",),
    "ops.op_builder": ("deepspeed_aio",),
    "runtime.activation_checkpointing.checkpointing": ("deepspeed_checkpointing",),
    "runtime.base_optimizer": ("optimizer_types",),
    "runtime.config": ("deepspeed_config",),
    "runtime.dataloader": ("deepspeed_engine",),
    "runtime.engine": ("deepspeed_engine",),
    "runtime.lr_schedules": ("lr_schedules",),
    "runtime.pipe.engine": ("pipeline_engine",),
    "runtime.pipe.module": ("pipeline_module",),
    "runtime.pipe.topology": ("pipeline_module",),
    "runtime.utils": ("deepspeed_reports", "deepspeed_accelerator", "pipeline_module"),
    "runtime.zero": ("zero_parameters", "zero_construction", "deepspeed_reports", "optimizer_types"),
    **dict.fromkeys(("runtime.zero.config", "runtime.zero.offload_config"), ("deepspeed_config",)),
    "runtime.zero.parameter_offload": ("optimizer_types",),
    "utils.groups": ("deepspeed_comm",),
    "utils.logging": ("deepspeed_reports",),
    **dict.fromkeys(("utils.init_on_device", "utils.z3_leaf_module"), ("zero_construction",)),
    "utils.tensor_fragment": ("zero_parameters",),
    "utils.zero_to_fp32": ("checkpoint_io.checkpoint_weights",),
}


_COLLECTIVE = "collective, at every stage and tier"
_FULL_STATE = f"{_COLLECTIVE}, independent of stage3_gather_16bit_weights_on_model_save"
_RANDOM = "for the random numbers of the accelerator, or of the CPU if there is none"
_FOR_ISINSTANCE = "only for isinstance checks"
_ENGINE, _PIPELINE = "deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"

# Notes on full names by fnmatch patterns of them. The first match applies.
DIFFERENCES: dict[str, str] = {
    "deepspeed.initialize": "raises for mpu and mesh_param. Without an optimizer the engine only runs "
    "the model",
    "deepspeed.init_distributed": "uses gloo, and NCCL alongside it if there is CUDA",
    "deepspeed.DeepSpeedConfig*": "unknown keys are errors",
    f"{_ENGINE}.no_sync": "allowed at every stage",
    f"{_ENGINE}.coalesce_grad_reduction": "allowed at every stage",
    f"{_ENGINE}.save_checkpoint": "writes zero_ext's format under global_step{N} and commits it with "
    "one rename. client_state may contain JSON values and tensors. Frozen parameters are always saved",
    f"{_ENGINE}.load_checkpoint": "loads at any world size and stage. custom_load_fn raises. Counts "
    "of steps stay where optimizer states do",
    f"{_ENGINE}.save_*_model": _FULL_STATE,
    f"{_ENGINE}.*module_state_dict": _FULL_STATE,
    f"{_ENGINE}.get_global_grad_norm": "returns None before the first step, and without clipping or fp16",
    f"{_ENGINE}.zero_gather_16bit_*": "always returns True, since full weights are always available",
    f"{_ENGINE}.loss_scale": "that of the JSON. engine.optimizer.loss_scale is the one in force",
    **dict.fromkeys(
        (
            f"{_ENGINE}.zero_{name}"
            for name in ("[rp]*_bucket_size", "param_*_threshold", "max_reuse_distance")
        ),
        "the default is that of zero_ext",
    ),
    f"{_ENGINE}.destroy": "does nothing, since memory is released with the model",
    f"{_ENGINE}.compile": "raises. Compile the blocks of the model before initialize",
    "deepspeed.comm.*_from_launcher": "reads the variables of torchrun",
    "deepspeed.comm.has_*coalesc*": "returns False, since coalesced functions are unsupported",
    "deepspeed.comm.*": "same as in torch.distributed. Functions accept and ignore prof, log_name and debug",
    "deepspeed.zero.Init": 'ignores values "auto" and uses the tier of offload_param',
    "deepspeed.zero.GatheredParameters": "a write without modifier_rank raises instead of being dropped",
    "deepspeed.zero.register_external_parameter": "does nothing, since a read gathers the parameter",
    "deepspeed.zero.TiledLinear": "its state dict is that of the layer without tiles",
    "*.DeepSpeedZeroOptimizer*": _FOR_ISINSTANCE,
    "*.ZeROOptimizer": _FOR_ISINSTANCE,
    "deepspeed.DeepSpeedOptimizer": _FOR_ISINSTANCE,
    "*.ZeroParam[ST]*": "for ds_status of parameters in stage 3",
    "*.estimate_zero*": "estimates the bytes of this engine",
    **{
        f"deepspeed.ops.{each.name.lower()}.*{each.name}": "constructs "
        + (f"torch's {each.name}" if each.module == TORCH else f"zero_ext.{each.name}")
        for each in _DEEPSPEEDS
    },
    "deepspeed.ops.adam.*Adam": "constructs torch's AdamW or Adam, which run fused",
    "deepspeed.*.AsyncIOBuilder": "short transfers are continued, and errors raise with path and reason",
    "*.installed_ops": "lists the ops that zero_ext supports, which need no build",
    "deepspeed.runtime.lr_schedules.[WOL]*": "torch scheduler that also loads DeepSpeed's state",
    "*.partition_balanced": "the heaviest part is as light as possible",
    "deepspeed.utils.safe_?et_full_*": _COLLECTIVE,
    "deepspeed.utils.safe_?et_local_*": "the values are the flat shard of this rank",
    "deepspeed.utils.*z3_leaf*": "call it before initialize",
    "deepspeed.utils.get_*parallel*": "answers for the newest pipeline, or for all ranks without one",
    "deepspeed.checkpointing.configure": "inputs can be stored on the CPU or in one buffer without "
    "partitioning. Partitioning requires mpu",
    "deepspeed.checkpointing.*checkpoint": "calls zero_ext.checkpoint_activations, which is never reentrant",
    "deepspeed.checkpointing.reset": "does nothing, since buffers are emptied automatically",
    "deepspeed.checkpointing.*rng*": _RANDOM,
    "deepspeed.checkpointing.model_parallel_*": _RANDOM,
    "deepspeed.utils.zero_to_fp32.*": "reads folders of DeepSpeed and of zero_ext, and never overwrites "
    "weights",
    "deepspeed.PipelineModule": "works in every ZeRO stage, along the axes 'pipe' and 'data'. Parameters "
    "are named layers.<number>..., and the heaviest stage is as light as possible. seed_layers, seed_fn "
    "and an activation_checkpoint_func raise",
    "deepspeed.pipe.LayerSpec": "initial values depend only on torch's seed and the number of the layer",
    "deepspeed.pipe.TiedLayerSpec": "shares all parameters, independent of tied_weight_attr",
    _PIPELINE: "return type of initialize for a PipelineModule",
    **dict.fromkeys(
        (
            f"{_PIPELINE}.{name}"
            for name in ("forward", "backward", "step", "*_sync", "*_grad_*", "set_grad*")
        ),
        "raises, since a pipeline runs full batches. Call train_batch or eval_batch",
    ),
    f"{_PIPELINE}.train_batch": "data that ends or does not fit on one rank is an error on all ranks",
    f"{_PIPELINE}.eval_batch": "the loss is on all ranks, independent of bcast_loss. reduce_output is 'avg' "
    "for losses and None for outputs (compute_loss=False). num_micro_batches must be that of a step",
    f"{_PIPELINE}.*checkpoint": "loads with any number of stages and ranks and at any ZeRO stage",
    "*.DEEPSPEED_ENVIRONMENT_NAME": "only DeepSpeed's launcher reads that file",
    "deepspeed.monitor.*": "only rank 0 writes",
    "deepspeed.accelerator.*": "for the CPU or CUDA",
}

_DUAL = (
    "use zero_ext.parallel.pipeline.PipelineModule with schedule='zbv' or 'zero_bubble', which fill bubbles"
)
_INFERENCE = (
    "there is no inference engine. zero_ext.prepare(model, None, config) runs models larger than the device"
)
_TENSOR = "use zero_ext.parallel.apply_tensor_parallel before prepare"
_SEQUENCE = "use zero_ext.integrations.apply_sequence_parallel"
_EXPERTS = (
    "for experts on different ranks use zero_ext.parallel.experts.MixtureOfExperts, on the axis 'ep' of "
    "zero_ext.parallel.make_mesh. For a model's own layers use deepspeed.utils.set_z3_leaf_modules"
)
_COUNTED = "the engine always counts the bytes that it sends. Read zero_ext.zero.engine_of(engine).traffic"
_COMPILE = "DeepCompile does not exist here. Compile the blocks of the model before initialize"
_DATA = "there is no curriculum learning. Choose samples in the data set"
_GRID = "use the module's mesh, a torch DeviceMesh with groups and ranks, as in module.mesh['dp'].get_group()"
_LOADER = "pass training_data and collate_fn to initialize"
_TUNE = "use 'zero-ext plan' and 'zero-ext tune'"
_CONFIG = "read the attributes of deepspeed.DeepSpeedConfig(json), or the JSON itself"

REASONS: dict[str, str] = {
    "*autotuning_*": _TUNE,
    "deepspeed.autotuning*": _TUNE,
    "deepspeed.compile*": _COMPILE,
    "*Engine.*compile_*": _COMPILE,
    "*Engine.get_*_backend": _COMPILE,
    "*Engine.set_train_*": "batch sizes are part of the set-up. Write managed_gradient_accumulation false in "
    "the JSON, and call step() where a step ends",
    "*Engine.*load_states": "use zero_ext.sleep(engine) and zero_ext.wake(engine)",
    **dict.fromkeys((f"*Engine.{name}" for name in ("deepspeed_io", "*_fn", "*_func", "*ing_data")), _LOADER),
    **dict.fromkeys((f"*Engine.{name}" for name in ("*curriculum*", "data_*_config", "random_ltd*")), _DATA),
    "*Engine.a??_config": "read engine.zero_config.aio",
    "*Engine.*allreduce*": "backward and step reduce gradients. Use torch.distributed for other tensors",
    "*Engine.*timer*": "set wall_clock_breakdown in the JSON",
    "*Engine.monitor": "write the section csv_monitor, tensorboard or wandb in the JSON",
    "*Engine.[bc]*_optimizer": "read engine.optimizer.optimizer",
    "*Engine.*moe_*": _EXPERTS,
    "*Engine.torch_autocast*": "put torch.autocast around the forward pass",
    "*Engine.grid": _GRID,
    "deepspeed.io*": "use deepspeed.ops.aio, or torch.save",
    "deepspeed.launcher*": "start with 'zero-ext run --deepspeed-compat', accelerate launch or torchrun",
    "deepspeed.linear*": "use PEFT's LoRA. Frozen weights are sharded and offloaded in their own dtype",
    "deepspeed.moe*": _EXPERTS,
    "*expert*": _EXPERTS,
    "deepspeed.nvme*": "measure devices with 'zero-ext bench-nvme'",
    "deepspeed.profiling*": "set flops_profiler in the JSON, or use torch.profiler with with_flops=True",
    "deepspeed.sequence*": _SEQUENCE,
    "*sequence_parallel*": _SEQUENCE,
    "*[dD]ual[pP]ipe[vV]*": _DUAL,
    "*.PipelineParallelGrid*": _GRID,
    "deepspeed.runtime.pipe.schedule*": "pass the name of a schedule to "
    "zero_ext.parallel.pipeline.PipelineModule",
    "deepspeed.comm.*_coalesced": "use torch.distributed's functions tensor by tensor",
    "deepspeed.comm.comm.mpi_discovery": "start with torchrun, which sets the environment",
    "deepspeed.comm*log*": _COUNTED,
    "deepspeed.comm.comm.configure": _COUNTED,
    "*.TiledLinearReturnBias": "use deepspeed.zero.TiledLinear(..., bias=False) and add the bias outside",
    "deepspeed.runtime.zero.linear*": "use torch.nn.Linear. Sharded weights are gathered again in backward",
    "deepspeed.runtime.zero.leaf_module_config*": "write zero_optimization.leaf_module in the JSON, or call "
    "deepspeed.utils.set_z3_leaf_modules",
    "*[zZ]en[fF]low*": "split optimizer steps do not exist here. offload.update_mode 'delayed' overlaps the "
    "update with the next step",
    "*.GDSBuilder": "the engine makes such transfers itself. Set aio.use_gds",
    "deepspeed.ops.op_builder*": "nothing has to be built. Use the optimizer classes and zero_ext.ops",
    "deepspeed.ops.fp_quantizer*": "quantize with torchao",
    "deepspeed.ops.[dt]*": _INFERENCE,
    "deepspeed.*inference*": _INFERENCE,
    "deepspeed.module_inject*": _INFERENCE,
    "deepspeed.model_implementations*": _INFERENCE,
    "deepspeed.runtime.hybrid_engine*": _INFERENCE,
    "*HybridEngine*": _INFERENCE,
    "deepspeed.runtime.data_pipeline*": _DATA,
    "*muon*": "write the optimizer type Muon in the JSON, or use zero_ext.Muon",
    "deepspeed.set_optimizer_flags": "set the attribute use_muon of parameters",
    "deepspeed.runtime.comm*": "its collectives are part of optimizers here. Use zero_ext.OneBitAdam",
    "deepspeed.*tensor_parallel*": _TENSOR,
    "deepspeed.*model_parallel*": _TENSOR,
    "deepspeed.tp_model_init": _TENSOR,
    "deepspeed.runtime.lr_schedules.*": "write the 'scheduler' section in the JSON",
    "deepspeed.runtime.dataloader.*": _LOADER,
    "deepspeed.runtime.config.*Writer": "write the JSON with json.dump. initialize checks it",
    "deepspeed.runtime.*config*": _CONFIG,
    "deepspeed.monitor.comet*": "use csv_monitor, tensorboard or wandb",
    "deepspeed.utils.numa*": "bind ranks with torchrun --numa-binding or numactl",
    "*.clip_*": "gradients are sharded over ranks. Set gradient_clipping in the JSON",
    "deepspeed.utils.tensor_fragment.safe_*": "use safe_get_full_grad and safe_set_full_grad, or param.grad",
    "deepspeed.utils.nvtx*": "use torch.profiler.record_function",
    "*": "internal to DeepSpeed, and replaced by the implementation of zero_ext",
}


class Definition(NamedTuple):
    """The place where DeepSpeed defines a name. ``name`` is empty if the name is a module."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.name}" if self.name else self.module


class Names:
    """Questions about the content of names.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.version: str = values["versions"][ROOT]
        self.used: dict[str, list[str]] = values["used"]
        self.modules: dict[str, Any] = values["modules"]
        self.engines: dict[str, str] = values["engines"]

    def member(self, name: str) -> str | None:
        """Return the path of a public method or attribute of DeepSpeed's engines; None if they have none."""
        found = (f"{ROOT}.{kind}.{name}" for kind, listed in self.engines.items() if name in listed.split())
        return next(found, None)

    def constants(self, module: str) -> dict[str, Any]:
        """Return the constants that ``module`` defines, with their values."""
        found: dict[str, Any] = self.modules[module].get("constants", {})
        return found

    def is_constant(self, definition: Definition) -> bool:
        """Return whether a name is a constant, which this package has by its value."""
        return bool(definition.name) and definition.name in self.constants(definition.module)

    def own(self, module: str) -> set[str]:
        """Return the names that ``module`` defines."""
        return {*self.modules[module].get("own", "").split(), *self.constants(module)}

    def all_of(self, module: str) -> set[str]:
        """Return all names of ``module`` except for its submodules: those it defines and those it imports."""
        found = self.own(module)
        for origin, pairs in self._imports(module):
            found |= pairs.keys() - {"*"}
            if "*" in pairs:
                found |= {name for name in self.all_of(origin) if not name.startswith("_")}
        return found

    def definition(self, module: str, name: str, passed: tuple[str, ...] = ()) -> Definition | None:
        """Return where ``name`` of ``module`` is defined; None if there is no such name.

        ``passed`` are modules that import from each other and were asked on the way here.
        """
        if f"{module}.{name}" in self.modules:
            return Definition(f"{module}.{name}", "")
        if module not in self.modules or module in passed:
            return None
        if name in self.own(module):
            return Definition(module, name)
        for origin, pairs in self._imports(module):
            there = pairs.get(name, name if "*" in pairs and not name.startswith("_") else None)
            found = self.definition(origin, there, (*passed, module)) if there else None
            if found is not None:
                return found
        return None

    def module(self, path: str) -> str | None:
        """Return the module that ``import path`` means, or None: DeepSpeed also binds modules, like
        ``deepspeed.zero``, under shorter names."""
        if path in self.modules:
            return path
        parent, _, name = path.rpartition(".")
        behind = self.module(parent) if parent else None
        found = self.definition(behind, name) if behind else None
        return found.module if found is not None and not found.name else None

    @cached_property
    def short_modules(self) -> dict[str, str]:
        """Modules that the package itself binds under a shorter name, by their full name."""
        found = ((self.definition(ROOT, name), name) for name in self.all_of(ROOT))
        return {where.module: f"{ROOT}.{name}" for where, name in found if where and not where.name}

    def _imports(self, module: str) -> Iterator[tuple[str, dict[str, str]]]:
        for origin, names in self.modules[module].get("from", {}).items():
            pairs = (pair.partition(":") for pair in names.split())
            yield origin, {alias or name: name for name, _, alias in pairs}


@cache
def names() -> Names:
    """Return the names of the release that this package follows."""
    return Names(json.loads(FILE.read_text(encoding="utf-8")))


@cache
def mirrors_of(module: str) -> tuple[str, ...]:
    """Return the modules here in which to look for what DeepSpeed's ``module`` defines: its own, or those of
    the package that it is in."""
    inner = module.removeprefix(f"{ROOT}.")
    if module == ROOT:
        return (_PACKAGE,)
    while inner not in _SERVED_BY and "." in inner:
        inner = inner.rpartition(".")[0]
    return tuple(f"{_PACKAGE}.{each}" for each in _SERVED_BY.get(inner, ()))


def difference_of(path: str) -> str:
    """Return the differences of a supported name, or an empty text."""
    return _first(DIFFERENCES, path)


def reason_of(path: str) -> str:
    """Return the reason and the alternative for an unsupported name, by the path of its definition."""
    return _first(REASONS, path)


def fix_of(path: str) -> str:
    """Return the same as a sentence."""
    reason = reason_of(path)
    return f"{reason[0].upper()}{reason[1:]}."


def _first(notes: dict[str, str], path: str) -> str:
    return next((note for pattern, note in notes.items() if fnmatchcase(path, pattern)), "")
