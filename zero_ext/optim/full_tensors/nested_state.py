"""State of one parameter as named tensors, and back: lists, tuples and dicts of tensors, numbers and None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zero_ext.offload import MASTER

_RESERVED = (MASTER, "buffer")
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class NamedState:
    """State of a parameter by path, such as ``factors[0]``; ``spec`` says how it is nested."""

    tensors: Mapping[str, torch.Tensor]  # numbers as 0-d ones
    kinds: tuple[str, ...]  # paths of all entries, in order
    types: tuple[type, ...]  # of all entries
    spec: pytree.TreeSpec

    def nested(self) -> dict[str, Any]:
        """Return the state as the optimizer has it: the same tensors."""
        leaves = [
            None
            if each is type(None)
            else self.tensors[kind].item()
            if each in _NUMBERS
            else self.tensors[kind]
            for kind, each in zip(self.kinds, self.types, strict=True)
        ]
        found: dict[str, Any] = pytree.tree_unflatten(leaves, self.spec)
        return found

    @property
    def layout(self) -> dict[str, tuple[Any, ...]]:
        """Shapes and dtypes by path, and the types of the other entries."""
        tensors = {kind: (tuple(each.shape), each.dtype) for kind, each in self.tensors.items()}
        return {
            kind: (each, *tensors.get(kind, ())) for kind, each in zip(self.kinds, self.types, strict=True)
        }

    def copy(self) -> NamedState:
        """Return a copy that shares no memory with this one."""
        tensors = {kind: each.clone() for kind, each in self.tensors.items()}
        return NamedState(tensors, self.kinds, self.types, self.spec)


def named_state(state: Mapping[str, Any], parameter: torch.Tensor) -> NamedState:
    """Return ``state`` of ``parameter`` by path.

    Raises:
        ValueError: an entry is no tensor, number or None, or shares its memory with another one or with
            the parameter, so that a checkpoint cannot store it.
    """
    leaves, spec = pytree.tree_flatten_with_path(dict(state))
    tensors: dict[str, torch.Tensor] = {}
    shared = {parameter.untyped_storage().data_ptr(): "the parameter"}
    for path, leaf in leaves:
        kind = _path(path)
        if kind in _RESERVED or "/" in kind:
            raise ValueError(
                f"state entry '{kind}': expected a name without '/' and none of {' and '.join(_RESERVED)}, "
                "got one that checkpoints use. Rename it."
            )
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_complex():
            tensors[kind] = leaf.detach()
            memory = leaf.untyped_storage().data_ptr()
            if memory and memory in shared:
                raise ValueError(
                    f"state entry '{kind}': expected memory of its own, got that of "
                    f"{shared[memory]}. Clone it."
                )
            shared[memory] = f"state entry '{kind}'"
        elif type(leaf) in _NUMBERS:
            tensors[kind] = torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu")
        elif leaf is not None:
            raise ValueError(
                f"state entry '{kind}': expected a dense real tensor, a number or None, which checkpoints "
                f"can store, got {leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__}. "
                "Keep it elsewhere."
            )
    kinds = tuple(_path(path) for path, _ in leaves)
    types = tuple(torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf) for _, leaf in leaves)
    return NamedState(tensors, kinds, types, spec)


def _path(keys: tuple[Any, ...]) -> str:
    text = ""
    for key in keys:
        if isinstance(key, pytree.MappingKey):
            text += f".{key.key}" if isinstance(key.key, str) else f"{{{key.key}}}"
        else:
            text += str(key)
    return text.removeprefix(".")
