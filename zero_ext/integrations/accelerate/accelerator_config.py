"""The configuration of a ``ZeroAccelerator``, compared with Accelerator's arguments, and unsupported ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs
from torch import nn

from zero_ext.config import ConfigError, Note, ZeroConfig
from zero_ext.config.config_errors import Problem
from zero_ext.config.deepspeed.deepspeed_keys import LEFT_OUT
from zero_ext.config.sources.config_source import WrittenConfig
from zero_ext.integrations.prepare_with_features import keys_set_elsewhere, written_value
from zero_ext.integrations.requested_layout import with_parallelism

_NAME = "ZeroAccelerator"
_SOURCE = "ZeroAccelerator(config=...) and Accelerator's arguments"
_AGREE = "Make them agree, or leave one out."
_OLDEST = (1, 10)
_PRECISIONS = ("no", "bf16", "fp16")
# Keys of the configuration that the script or Accelerate sets itself, and where to set them instead.
_ACCELERATES = {
    "optimizer": "the script passes its optimizer to accelerator.prepare",
    "scheduler": "the script passes its scheduler to accelerator.prepare",
    "checkpoint.keep_last": "Accelerate counts its own folders: ProjectConfiguration(total_limit=...)",
    "checkpoint.async_save": "Accelerate removes older checkpoints as soon as a save returns",
}
# Keys that may be "auto": the script's loaders and its calls of clip_grad_norm_ have the values.
_FROM_SCRIPT = ("batch.micro_batch_size", "batch.train_batch_size", "gradient_clipping")
_OWN_SHARDING = "zero_ext shards the model itself. Leave it out, and describe the sharding by config="
_PLUGINS = {
    "deepspeed_plugin": "starts DeepSpeed. Pass its JSON as config=",
    "deepspeed_plugins": "starts DeepSpeed. Pass the JSON of one plugin as config=",
    "fsdp_plugin": _OWN_SHARDING,
    "megatron_lm_plugin": "starts Megatron-LM. Leave it out",
    "torch_tp_plugin": "replaces parameters by DTensors. Leave it out",
}


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` that lists the ``arguments`` of Accelerator and the environment variables
    that contradict a sharded model, ``ImportError`` for an accelerate that is too old."""
    version = tuple(map(int, accelerate.__version__.split(".")[:2]))
    if version < _OLDEST:
        raise ImportError(
            f"accelerate: expected version {'.'.join(map(str, _OLDEST))} or newer, got "
            f"{accelerate.__version__}. Run pip install -U accelerate."
        )
    found = [f"{name}: {why}." for name, why in _PLUGINS.items() if arguments.get(name) is not None]
    for switch in (
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
    ):
        if os.environ.get(switch, "false").lower() in ("true", "1"):
            found.append(f"{switch}: starts another library's sharding. Use accelerate launch without it.")
    found += [
        text for handler in arguments.get("kwargs_handlers") or () if (text := _refused_handler(handler))
    ]
    dynamo = arguments.get("dynamo_plugin") or arguments.get("dynamo_backend")
    backend = getattr(dynamo, "backend", dynamo) or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if str(getattr(backend, "value", backend)).lower() != "no":
        found.append(
            "dynamo_backend: compiles the whole model around its hooks. Compile its blocks before prepare: "
            "for block in model.layers: block.compile()."
        )
    if found:
        raise ValueError(f"{_NAME}: unsupported arguments: {' '.join(found)} Change them.")


def refuse_model(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model that is compiled as a whole, spread over devices, or quantized to
    8 bits."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            "prepare: expected a plain model, got one that is compiled as a whole. Compile its blocks: "
            "for block in model.layers: block.compile()."
        )
    for module in model.modules():
        spread = len(getattr(module, "hf_device_map", None) or ()) > 1 or hasattr(module, "_hf_hook")
        if spread or getattr(module, "is_loaded_in_8bit", False):
            got = "one spread by device_map" if spread else "one loaded in 8 bits"
            raise ValueError(
                f"{type(model).__name__}: expected a model on one device with floating-point weights, got "
                f"{got}. Load it without device_map and quantization. Keys offload of config= store what "
                "exceeds the device."
            )


def _refused_handler(handler: Any) -> str:
    name = type(handler).__name__
    if name.endswith("RecipeKwargs"):
        return f"{name}: starts fp8. Use bf16."
    if isinstance(handler, GradScalerKwargs):
        return "GradScalerKwargs: the engine scales the loss. Set loss_scale in config=."
    hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
    if isinstance(handler, DistributedDataParallelKwargs) and hook != DDPCommunicationHookType.NO:
        return (
            f"DistributedDataParallelKwargs(comm_hook={hook.value!r}): the engine reduces the gradients. Set "
            "precision.communication_dtype in config=."
        )
    return ""


def resolve_settings(
    written: WrittenConfig, arguments: Mapping[str, Any]
) -> tuple[ZeroConfig, str, tuple[Note, ...]]:
    """Return the configuration in force, Accelerate's name of its precision, and notes on DeepSpeed's keys.

    Precision and gradient accumulation of Accelerator's ``arguments`` and of ``accelerate launch``
    complete what was ``written``. Raises ``ConfigError`` that shows both sides of each contradiction.
    """
    precision = arguments.get("mixed_precision")
    wanted = str(precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if wanted not in _PRECISIONS:
        raise ValueError(
            f"mixed_precision: expected one of {', '.join(map(repr, _PRECISIONS))}, got {wanted!r}. Pass one "
            "of them to ZeroAccelerator or accelerate launch."
        )
    dtype, steps = (None if wanted == "no" else wanted), _accumulation(arguments)
    resolve: dict[str, object] = {
        **dict.fromkeys(_FROM_SCRIPT, LEFT_OUT),
        "batch.gradient_accumulation_steps": steps or LEFT_OUT,
        "precision.dtype": dtype or "keep",
    }
    config, notes = written.with_dtype(dtype).resolved(resolve)
    problems = keys_set_elsewhere(config, _ACCELERATES)
    said = written_value(config, "precision.dtype")
    reduced = said in ("bf16", "fp16")
    if (dtype is not None and said not in (None, dtype)) or (precision is not None and not dtype and reduced):
        problems.append(
            Problem("precision.dtype", f"config has {said!r}, mixed_precision is {wanted!r}. {_AGREE}")
        )
    path = "batch.gradient_accumulation_steps"
    said_steps = written_value(config, path)
    if None not in (steps, said_steps) and steps != said_steps:
        problems.append(
            Problem(path, f"config has {said_steps}, gradient_accumulation_steps is {steps}. {_AGREE}")
        )
    if problems:
        raise ConfigError(problems, _SOURCE)
    if dtype is not None:
        config = config.replace(precision=config.precision.replace(dtype=dtype))
    if steps is not None:
        config = with_accumulation(config, steps)
    config = with_parallelism(config, arguments.get("parallelism_config"))
    used = config.precision.dtype
    return config, (used if used in _PRECISIONS else "no"), notes


def with_accumulation(config: ZeroConfig, steps: int) -> ZeroConfig:
    """Return ``config`` with ``steps`` micro-batches per optimizer step."""
    return config.replace(batch=config.batch.replace(gradient_accumulation_steps=steps))


def _accumulation(arguments: Mapping[str, Any]) -> int | None:
    """Return the micro-batches per step that the script or the launcher sets, None if neither does."""
    plugin = arguments.get("gradient_accumulation_plugin")
    if plugin is not None:
        return int(plugin.num_steps)
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if launched is not None:  # which Accelerator takes before its argument
        return int(launched)
    return arguments.get("gradient_accumulation_steps")
