"""``from_pretrained`` that reads each rank's shards out of the files: the model is never whole anywhere."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, GenerationConfig

from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.weights.load_into_meta import load_into_meta
from zero_ext.comm.process_group import join_world
from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import show
from zero_ext.config.sources.config_source import ConfigSource
from zero_ext.integrations.requested_layout import layout_mesh
from zero_ext.integrations.transformers.trainer_config import load_settings
from zero_ext.integrations.transformers.weight_conversion import ConvertedWeights
from zero_ext.parallel import apply_expert_parallel
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.construction.sharded_init import Init
from zero_ext.zero.units.rank_groups import mesh_lengths, rank_groups

logger = logging.getLogger("zero_ext")
_UNSUPPORTED = {
    "device_map": "shards go where zero_config says",
    "max_memory": "shards go where zero_config says",
    "quantization_config": "weights are read as stored; quantize with transformers (docs/how_to/peft.md)",
    "state_dict": "weights come from the folder",
}


def from_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    zero_config: ConfigSource = None,
    *,
    dtype: torch.dtype | str = "auto",
    config: Any = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    **settings: Any,
) -> Any:
    """Load the model in `folder` with parameters initialized as shards; a collective of all ranks.

    Each rank reads the bytes of its own shards, in chunks, into the tier that `zero_config` names,
    so no rank holds the model, whatever its size. Experts that the files hold one by one are stacked, and
    matrices concatenated or transposed, on the way. The model goes to `ZeroTrainer` or
    [`prepare`][zero_ext.prepare] with the same configuration. Parameters that the files lack (a new head) are
    initialized as the model's class does, each in full, and named in a warning. `resize_token_embeddings`
    works on it as on any model.
    Stages below 3 keep full parameters.

    Where the section `parallel` of `zero_config` or a mesh has "ep" over 1, experts are spread over it as
    [`apply_expert_parallel`][zero_ext.parallel.apply_expert_parallel] does, and each rank reads its own. All
    of them must be in the files.

    Args:
        model_class: a class of transformers, `AutoModelFor...` too.
        folder: as `save_pretrained` writes it, with safetensors; readable on every rank.
        zero_config: what `ZeroTrainer` takes; "auto" values do not matter here.
        dtype: of the parameters; "auto" takes the one the folder's configuration names.
        config: a configuration instead of the folder's.
        process_group: the data-parallel ranks, or a mesh with "dp", "ep" and "cp", as for `prepare`.
        **settings: for the configuration or the model's class, as in transformers (`num_labels`,
            `attn_implementation`).

    Returns:
        The model.

    Raises:
        CheckpointError: weights are missing, damaged or hostile.
        TypeError: no class of models, or a setting that nothing takes.
        ValueError: shapes do not fit, experts are missing or there twice, the folder holds a model of another
            class, the weights are quantized, or the class computes with values of the files. The mesh splits
            tensors or layers, or the model's experts cannot be spread over it.
        ConfigError: `zero_config` cannot be used.
    """
    chosen = load_settings(zero_config)
    _check_class(model_class, dtype)
    if not Path(folder).is_dir():
        raise CheckpointError(f"{os.fspath(folder)}: no such folder. Download the model first.")
    implementation = {key: settings.pop(key) for key in ("attn_implementation",) if key in settings}
    if config is None:
        config = _read_config(folder, settings)
    elif settings:
        raise TypeError(
            f"settings: expected none with config=, got {sorted(settings)}. Put them into config."
        )
    _check_config(model_class, config, folder)
    ranks = _ranks_of(chosen, process_group)
    model = _skeleton(model_class, config, dtype, implementation)
    if isinstance(ranks, DeviceMesh) and mesh_lengths(ranks).get("ep", 1) > 1:
        apply_expert_parallel(model, ranks)
    weights = ConvertedWeights(model)
    missing, unexpected = load_into_meta(model, folder, chosen, weights, ranks)
    model._weight_conversions = weights.used_rules()  # save_pretrained reverts them
    _report(model, missing, unexpected, folder)
    # What is still to be initialized, or written to by tying, is whole only while it is touched.
    data = rank_groups(ranks).data
    with Init(chosen, process_group=data):
        _finish(model, missing)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if chosen.stage == 3:
        model.resize_token_embeddings = _ResizeShards(model, chosen, data)
    return model


def _ranks_of(
    config: ZeroConfig, process_group: dist.ProcessGroup | DeviceMesh | None
) -> dist.ProcessGroup | DeviceMesh | None:
    """Return ``process_group``, or the mesh over which ``config`` spreads experts. ``ValueError`` if they
    differ, or the mesh splits models."""
    join_world(config.timeout_seconds)
    lengths = mesh_lengths(process_group) if isinstance(process_group, DeviceMesh) else {}
    if process_group is None and config.parallel.ep > 1:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return layout_mesh(config, ranks, accelerator_or_cpu().type)
    split = {name: lengths[name] for name in ("pp", "tp") if lengths.get(name, 1) > 1}
    if split:
        raise ValueError(
            f"process_group: expected a mesh without 'pp' and 'tp' longer than 1, got {split}. Load the "
            "model with its class on every rank, and split it then."
        )
    if config.parallel.ep not in (1, lengths.get("ep", 1)):
        raise ValueError(
            f"parallel.ep: expected the length of 'ep' in process_group ({lengths.get('ep', 1)}) or 1, got "
            f"{config.parallel.ep}. Make them agree, or leave one out."
        )
    return process_group


def _check_class(model_class: Any, dtype: torch.dtype | str) -> None:
    """Raise ``TypeError`` for what is no class of models, ``ValueError`` for a dtype not of weights."""
    if not isinstance(model_class, type) or not hasattr(model_class, "from_pretrained"):
        raise TypeError(
            f"model_class: expected a class of transformers, got {show(model_class)}. Pass for example "
            "LlamaForCausalLM or AutoModelForCausalLM."
        )
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"dtype: expected 'auto' or a floating-point dtype, got {show(dtype)}. Pass for example "
            "torch.bfloat16."
        )


def _read_config(folder: str | os.PathLike[str], settings: dict[str, Any]) -> Any:
    """Return the folder's configuration with ``settings``; ``TypeError`` for those it does not support."""
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            f"{os.fspath(folder)}: expected a config.json, got none. Pass a folder that save_pretrained "
            "wrote, or config=."
        )
    refused = {name: why for name, why in _UNSUPPORTED.items() if settings.get(name) is not None}
    config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **settings)
    unknown = {name: "no such setting" for name in unknown if name not in _UNSUPPORTED}
    if refused or unknown:
        listed = ", ".join(
            f"{name} = {show(settings[name])}: {why}" for name, why in (refused | unknown).items()
        )
        raise TypeError(
            f"settings: neither {type(config).__name__} nor zero_ext's from_pretrained supports {listed}. "
            "Leave them out."
        )
    return config


def _check_config(model_class: Any, config: Any, folder: str | os.PathLike[str]) -> None:
    """Raise ``ValueError`` if the folder holds a model of another class, or quantized weights."""
    wanted = getattr(model_class, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):
        raise ValueError(
            f"{os.fspath(folder)}: expected a model of {wanted.__name__} for {model_class.__name__}, got "
            f"{config.model_type!r}. Pass the class that its config.json names ({config.architectures}), or "
            "an AutoModel class."
        )
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    raise ValueError(
        f"{os.fspath(folder)}: expected plain weights, got quantized ones "
        f"({getattr(method, 'value', method)}), which only the quantizer's own code reads, not shard by "
        f"shard. Load it with model = {getattr(model_class, '__name__', model_class)}.from_pretrained(folder)"
        " on every rank, then zero_ext.integrations.peft shards the bytes (docs/how_to/peft.md, QLoRA), or "
        "load the weights it was quantized from."
    )


def _skeleton(
    model_class: Any, config: Any, dtype: torch.dtype | str, implementation: Mapping[str, Any]
) -> Any:
    """Return the model on the meta device, tied."""
    wanted = config.dtype if dtype == "auto" else dtype
    make = model_class._from_config if hasattr(model_class, "_from_config") else model_class.from_config
    with torch.device("meta"):
        model = make(config, dtype=wanted or torch.float32, **implementation)
        model.tie_weights()
    # Some classes need float32 for a few tensors, such as the biases of routers.
    exceptions = [re.compile(each.replace("*", ".*")) for each in model._get_dtype_plan(model.dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(each.search(name) for each in exceptions):
            tensor.data = tensor.data.float()
    return model


def _report(model: Any, missing: list[str], unexpected: list[str], folder: str | os.PathLike[str]) -> None:
    """Log what was not found and what was not used, except what the model's class expects."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys:
        logger.warning("%s lacks %s: initialized anew", os.fspath(folder), sorted(info.missing_keys))
    if info.unexpected_keys:
        logger.warning("%s has %s: not used", os.fspath(folder), sorted(info.unexpected_keys))


def _finish(model: Any, missing: list[str]) -> None:
    """Initialize what the files did not have, buffers outside the state dict among it."""
    absent = set(missing)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in absent and not tensor.is_meta:
            tensor._is_hf_initialized = True
    model._move_missing_keys_from_meta_to_device(absent, None, None, None)
    model._initialize_missing_keys(False)
    model.tie_weights()
    model.eval()


class _ResizeShards:
    """``resize_token_embeddings`` of a model initialized as shards, which gathers what it changes."""

    def __init__(self, model: nn.Module, config: ZeroConfig, process_group: dist.ProcessGroup | None) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self._group = process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> _ResizeShards:
        """Return that of the model's copy, which is resized by itself."""
        model: Any = self._model()
        return _ResizeShards(memo.get(id(model), model), self._config, self._group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        with Init(self._config, process_group=self._group):
            return type(model).resize_token_embeddings(model, *args, **kwargs)  # type: ignore[union-attr]
