"""The modules of this package for DeepSpeed's modules, under the same path unless listed here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from zero_ext.integrations.deepspeed.registry.names import ROOT

_PACKAGE = "zero_ext.integrations.deepspeed"
_FOLDER = Path(__file__).parents[1]
_ELSEWHERE = {
    "checkpoint.utils": "checkpoint_io.clone_tensors",
    "ops.adagrad": "ops.optimizer_classes",
    "ops.adam": "ops.optimizer_classes",
    "ops.lamb": "ops.optimizer_classes",
    "ops.lion": "ops.optimizer_classes",
    "ops.op_builder": "ops.aio",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.base_optimizer": "zero.zero_optimizer_types",
    "runtime.engine": "deepspeed_engine",
    "runtime.pipe": "pipe",
    "runtime.pipe.engine": "pipe.pipeline_engine",
    "runtime.pipe.module": "pipe.pipeline_module",
    "runtime.pipe.topology": "process_topology",
    "runtime.zero": "zero",
    "runtime.zero.config": "runtime.config",
    "runtime.zero.parameter_offload": "zero.zero_optimizer_types",
    "runtime.zero.offload_config": "runtime.config",
    "utils.init_on_device": "utils.on_device",
    "utils.tensor_fragment": "utils.safe_get_set",
    "utils.z3_leaf_module": "utils.leaf_modules",
    "utils.zero_to_fp32": "checkpoint_io.checkpoint_weights",
}


@cache
def mirror_of(module: str) -> str | None:
    """Return the module here with the names that DeepSpeed's ``module`` defines; None if there is none."""
    if module == ROOT:
        return _PACKAGE
    local = inner = module.removeprefix(f"{ROOT}.")
    while local not in _ELSEWHERE and "." in local:
        local = local.rpartition(".")[0]
    if local in _ELSEWHERE:
        inner = _ELSEWHERE[local] + inner.removeprefix(local)
    path = _FOLDER.joinpath(*inner.split("."))
    found = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    return f"{_PACKAGE}.{inner}" if found else None


@cache
def nearest_mirror(module: str) -> str | None:
    """Return the module here in which to look for what ``module`` defines: its own mirror, or that of the
    package that it is in."""
    while module != ROOT:
        found = mirror_of(module)
        if found is not None:
            return found
        module = module.rpartition(".")[0]
    return None
