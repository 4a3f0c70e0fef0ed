"""A tensor of files without its values. Functions that rearrange it record where its elements go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zero_ext.checkpoint.weights.block_map import BlockMap, UnsupportedConversion

_aten = torch.ops.aten


class FileTensor(torch.Tensor):
    """A tensor of ``dtype`` that is assembled from those of files as ``blocks`` says.

    It is cut, joined, transposed and reshaped as any tensor, without values. UnsupportedConversion from all
    other operations.
    """

    blocks: BlockMap
    _meta: torch.Tensor

    @staticmethod
    def __new__(cls, blocks: BlockMap, dtype: torch.dtype, meta: torch.Tensor | None = None) -> FileTensor:
        if meta is None:
            meta = torch.empty(blocks.shape, dtype=dtype, device="meta")
        made: FileTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=meta.device
        )
        made.blocks, made._meta = blocks, meta
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            raise UnsupportedConversion(
                f"conversion: expected one that moves elements, got {func}. Load the weights in full."
            )
        # Shapes, strides and errors are torch's own, of tensors on the meta device.
        metas, options = tree_map(_meta_of, (args, dict(kwargs or {})))
        made = func(*metas, **options)
        found = rule(args, made)
        if isinstance(found, BlockMap):
            return FileTensor(found, made.dtype, made)
        return [FileTensor(blocks, meta.dtype, meta) for blocks, meta in zip(found, made, strict=True)]


def _meta_of(value: Any) -> Any:
    return value._meta if isinstance(value, FileTensor) else value


def _unchanged(args: Any, made: torch.Tensor) -> BlockMap:
    blocks: BlockMap = args[0].blocks
    return blocks


def _reshape(args: Any, made: torch.Tensor) -> BlockMap:
    blocks: BlockMap = args[0].blocks
    return blocks.reshaped(made.shape)


def _transpose(args: Any, made: torch.Tensor) -> BlockMap:
    tensor, one, other = args
    order = list(range(tensor.dim()))
    order[one], order[other] = order[other], order[one]
    blocks: BlockMap = tensor.blocks
    return blocks.permuted(order)


def _permute(args: Any, made: torch.Tensor) -> BlockMap:
    tensor, order = args
    blocks: BlockMap = tensor.blocks
    return blocks.permuted([dim % tensor.dim() for dim in order])


def _t(args: Any, made: torch.Tensor) -> BlockMap:
    blocks: BlockMap = args[0].blocks
    return blocks.permuted(range(args[0].dim())[::-1])


def _slice(args: Any, made: torch.Tensor) -> BlockMap:
    tensor, dim = args[0], args[1] if len(args) > 1 else 0
    if len(args) > 4 and args[4] != 1:
        raise UnsupportedConversion(
            f"conversion: expected slices without a step, got step {args[4]}. Load the weights in full."
        )
    size, begin = tensor.shape[dim], (args[2] if len(args) > 2 else None) or 0
    begin = max(0, begin + size) if begin < 0 else min(begin, size)
    blocks: BlockMap = tensor.blocks
    return blocks.narrowed(dim % tensor.dim(), begin, made.shape[dim])


def _select(args: Any, made: torch.Tensor) -> BlockMap:
    tensor, dim, index = args
    blocks: BlockMap = tensor.blocks
    return blocks.narrowed(dim % tensor.dim(), index % tensor.shape[dim], 1).reshaped(made.shape)


def _split(args: Any, made: Sequence[torch.Tensor]) -> list[BlockMap]:
    tensor, dim = args[0], args[2] if len(args) > 2 else 0
    found, begin = [], 0
    for each in made:
        found.append(tensor.blocks.narrowed(dim % tensor.dim(), begin, each.shape[dim]))
        begin += each.shape[dim]
    return found


def _unbind(args: Any, made: Sequence[torch.Tensor]) -> list[BlockMap]:
    dim = args[1] if len(args) > 1 else 0
    return [_select((args[0], dim, index), each) for index, each in enumerate(made)]


def _cat(args: Any, made: torch.Tensor) -> BlockMap:
    dim = args[1] if len(args) > 1 else 0
    return BlockMap.concatenated([each.blocks for each in args[0]], dim % made.dim())


def _stack(args: Any, made: torch.Tensor) -> BlockMap:
    dim = (args[1] if len(args) > 1 else 0) % made.dim()
    shape = (*made.shape[:dim], 1, *made.shape[dim + 1 :])
    return BlockMap.concatenated([each.blocks.reshaped(shape) for each in args[0]], dim)


_RULES: dict[Any, Callable[[Any, Any], BlockMap | list[BlockMap]]] = {
    _aten.alias.default: _unchanged,
    _aten.clone.default: _unchanged,
    _aten.detach.default: _unchanged,
    _aten._unsafe_view.default: _reshape,
    _aten.squeeze.dim: _reshape,
    _aten.squeeze.dims: _reshape,
    _aten.squeeze.default: _reshape,
    _aten.unsqueeze.default: _reshape,
    _aten.view.default: _reshape,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.t.default: _t,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
}
