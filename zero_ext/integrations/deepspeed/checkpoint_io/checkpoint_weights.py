"""The fp32 weights of a checkpoint, in zero_ext's format or in DeepSpeed's, under the names of DeepSpeed's
``zero_to_fp32``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.files import shortened
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.format.tensor_files import dtype_named
from zero_ext.checkpoint.inspection import holds_checkpoints, open_checkpoint
from zero_ext.checkpoint.weights.hf_export import LazyTensor, stored_weights, write_weights
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_folder import (
    CLIENT_STATE,
    find_files,
    tag_folder,
)
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import read_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_source import (
    DeepSpeedCheckpoint,
    StoredParameter,
)
from zero_ext.plan.parse_sizes import bytes_of
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import load_full_state_dict

SCRIPT_NAMES = ("zero_to_fp32.py", "zero_to_torch.py")
SCRIPT = '''#!/usr/bin/env python
"""Writes the weights of the checkpoint next to this file: python zero_to_fp32.py . output_dir; see --help."""

from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import main

if __name__ == "__main__":
    main()
'''
_UNLIMITED = 1 << 62
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MOST_NAMES_SHOWN = 5

Checkpoint = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Checkpoint,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]:
    """Return all parameters in float32, tied ones under each of their names, and the buffers, of the
    checkpoint ``checkpoint_dir/tag`` (by default that of the file ``latest``).

    The checkpoint may be zero_ext's own or one that DeepSpeed wrote, of any stage and number of ranks. With
    ``lazy_mode`` the values have ``shape`` and ``dtype``, and ``contiguous()`` that makes the tensor: then
    only those asked for are in memory. CheckpointError as in :func:`import_deepspeed_checkpoint`.
    """
    lazy = _weights(_folder(checkpoint_dir, tag), exclude_frozen_parameters)
    if lazy_mode:
        return lazy
    made = {id(tensor): tensor.contiguous() for tensor in {id(each): each for each in lazy.values()}.values()}
    return {name: made[id(tensor)] for name, tensor in lazy.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Checkpoint, tag: str | None = None
) -> nn.Module:
    """Fill ``model``, moved to the CPU, with the weights of a checkpoint, one tensor at a time; the model.

    A model in training is filled where it is, as :func:`zero_ext.load_full_state_dict` does it; a collective.
    ``ValueError`` names parameters and buffers that are missing, unexpected or of another shape, and nothing
    has changed then.
    """
    path = _folder(checkpoint_dir, tag)
    lazy = _weights(path)
    if _is_prepared(model):
        load_full_state_dict(model, {name: tensor.contiguous() for name, tensor in lazy.items()})
        return model
    live = model.cpu().state_dict(keep_vars=True)
    problems = [f"{name!r} is missing in the checkpoint" for name in live.keys() - lazy.keys()]
    problems += [f"{name!r} is not in the model" for name in lazy.keys() - live.keys()]
    problems += [
        f"{name!r} has shape {tuple(lazy[name].shape)}, the model's {tuple(value.shape)}"
        for name, value in live.items()
        if name in lazy and lazy[name].shape != value.shape
    ]
    if problems:
        shown = ", ".join(shortened(problem, 300) for problem in sorted(problems)[:_MOST_NAMES_SHOWN])
        raise ValueError(
            f"{path}: it does not fit this model: {shown} ({len(problems)} in all). Load it into the model "
            "that was saved."
        )
    with torch.no_grad():
        for name, value in live.items():
            value.copy_(lazy[name].contiguous())
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Checkpoint,
    output_dir: Checkpoint,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Write the weights in ``dtype`` (float32, float16 or bfloat16) to ``output_dir``; return the files.

    They are ``pytorch_model.bin``, to be read with ``torch.load``, or with ``safe_serialization``
    ``model.safetensors``, where tied tensors have the first of their names; several files have an index. One
    tensor is in memory at a time. ``ValueError`` for another dtype or size, or values beyond float16's range;
    ``CheckpointError`` as in :func:`import_deepspeed_checkpoint`, or if ``output_dir`` holds weights already.
    """
    wanted, limit = _dtype_of(dtype), _bytes_of(max_shard_size)
    weights = _weights(_folder(checkpoint_dir, tag), exclude_frozen_parameters, wanted)
    return write_weights(weights, Path(output_dir).absolute(), limit, pickled=not safe_serialization)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Checkpoint,
    output_dir: Checkpoint,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """:func:`convert_zero_checkpoint_to_state_dict` in float32."""
    more = (max_shard_size, safe_serialization, tag, exclude_frozen_parameters)
    return convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, *more)


def get_optim_files(checkpoint_dir: Checkpoint) -> list[str] | list[io.BytesIO]:
    """Return the optimizer's files of the checkpoint in this folder, one for each rank, for
    ``torch.load``.

    Of zero_ext's checkpoints they are in memory and say the stage and the number of ranks, no more.
    """
    path = Path(checkpoint_dir).absolute()
    if not holds_checkpoints(path):
        return [str(file) for file in find_files(path).optimizer]
    _, manifest = open_checkpoint(path)
    # The format is the same at every stage.
    state = {"zero_stage": 0, "partition_count": manifest.world_size}
    return [_in_memory({"optimizer_state_dict": state}) for _ in range(manifest.world_size)]


def get_model_state_file(checkpoint_dir: Checkpoint, zero_stage: int) -> str | io.BytesIO:
    """Return the model's file of the checkpoint in this folder, for ``torch.load``.

    Of zero_ext's checkpoints it is in memory and holds the client state and the counters. ``zero_stage`` does
    not matter: the folder says it.
    """
    path = Path(checkpoint_dir).absolute()
    if not holds_checkpoints(path):
        return str(find_files(path).model[0])
    path, manifest = open_checkpoint(path)
    try:
        state = decode(manifest.client_state, "client_state")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    client = state.get(CLIENT_STATE, {}) if isinstance(state, dict) else {}
    return _in_memory({**client, "global_steps": manifest.step, "dp_world_size": manifest.world_size})


def _in_memory(content: dict[Any, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of DeepSpeed's ``zero_to_fp32.py`` and ``zero_to_torch.py``."""
    parser = argparse.ArgumentParser(description="Write the weights of a checkpoint in files of their own.")
    parser.add_argument("checkpoint_dir", help="the folder that was given to save_checkpoint")
    parser.add_argument("output_dir", help="where the files are written")
    parser.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pickles")
    parser.add_argument("-t", "--tag", help="as global_step1; by default that of the file 'latest'")
    parser.add_argument("-e", "--exclude_frozen_parameters", action="store_true", help="leave them out")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    options = vars(parser.parse_args(arguments))
    debug = options.pop("debug")
    try:
        for path in convert_zero_checkpoint_to_state_dict(**options):
            print(path)
    except (CheckpointError, OSError, ValueError) as error:
        if debug:
            raise
        sys.exit(f"{parser.prog}: {error}")


def _folder(checkpoint_dir: Checkpoint, tag: str | None) -> Path:
    return tag_folder(Path(checkpoint_dir).absolute(), tag)


def _weights(
    path: Path, exclude_frozen: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, LazyTensor]:
    """Return every parameter and buffer by each of its names; floating-point ones become ``dtype``."""
    if holds_checkpoints(path):
        path, manifest = open_checkpoint(path)
        weights = stored_weights(path, manifest)
        aliases = {name: entry.aliases for name, entry in manifest.parameters.items()}
        frozen = {name for name, entry in manifest.parameters.items() if not entry.trainable}
    else:
        checkpoint = read_checkpoint(path)
        weights = _weights_of(checkpoint)
        aliases = dict(checkpoint.aliases)
        frozen = {name for name, entry in checkpoint.parameters.items() if entry.group is None}
    found = {}
    for name, tensor in weights.items():
        if not (exclude_frozen and name in frozen):
            if tensor.dtype.is_floating_point:
                tensor = replace(tensor, dtype=dtype)
            found.update(dict.fromkeys((name, *aliases.get(name, ())), tensor))
    return found


def _weights_of(checkpoint: DeepSpeedCheckpoint) -> dict[str, LazyTensor]:
    """Map it from the files of all ranks."""
    rank = cache(checkpoint.rank)

    def chunks(name: str, entry: StoredParameter) -> Iterator[torch.Tensor]:
        for fragment in entry.fragments:
            _, values = next(rank(fragment.rank).state_of(name, entry, fragment))
            yield values

    found = {
        name: LazyTensor(torch.Size(entry.shape), entry.dtype, partial(chunks, name, entry))
        for name, entry in checkpoint.parameters.items()
    }
    for name, buffer in checkpoint.buffers.items():
        found[name] = LazyTensor(buffer.shape, buffer.dtype, partial(iter, (buffer,)))
    return found


def _is_prepared(model: nn.Module) -> bool:
    try:
        engine_of(model)
    except ValueError:
        return False
    return True


def _dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).lower().removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in _SHORT_NAMES.values():
        raise ValueError(
            f"dtype: expected one of {', '.join(_SHORT_NAMES.values())}, got {dtype!r}. Choose one of those."
        )
    return dtype_named(name)


def _bytes_of(size: str | int | None) -> int:
    limit = _UNLIMITED if size is None else bytes_of(str(size), "max_shard_size")
    if limit < 1:
        raise ValueError(
            f"max_shard_size: expected at least one byte, got {size!r}. Give '5GB', for example."
        )
    return limit


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """``item`` with every tensor in it, through lists, tuples and dicts, copied to ``device``."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(each, device)) for key, each in item.items())
    return item
