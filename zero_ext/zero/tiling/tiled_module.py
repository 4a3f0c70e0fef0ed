"""Tiles as slices of a layer's weight, the base of tiled layers, and the names of their full tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero_ext.zero.units.dtensor_local import local_slice_of

Bounds = list[tuple[int, int]]


class Tile(nn.Module):
    """A slice of a layer's weight, and a unit of its own where parameters are sharded.

    Called with inputs that need no gradient it does not read its parameters in backward, so they need not
    be gathered there.
    """

    weight: nn.Parameter


def bounds(size: int, splits: int, what: str) -> Bounds:
    """Return begin and end of each of ``splits`` slices of ``size``. Their sizes differ by one at most.

    Raises ``ValueError`` naming ``what`` unless ``splits`` is an integer from 1 to ``size``.
    """
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= size:
        raise ValueError(
            f"{what}: expected an integer from 1 to {size}, got {splits!r}. Choose a number of "
            "tiles in that range."
        )
    return list(itertools.pairwise(size * number // splits for number in range(splits + 1)))


@dataclass(frozen=True)
class TileSlice:
    """A tile of ``sizes`` at ``offset`` of the tensor ``name`` of ``shape``; both row-major, 1-D or 2-D."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full tensor."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def view_in(self, full: torch.Tensor) -> torch.Tensor:
        """Return the tile's view of ``full`` [shape]."""
        for axis, (begin, size) in enumerate(zip(self.offset, self.sizes, strict=True)):
            full = full.narrow(axis, begin, size)
        return full

    def ranges(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tile's elements from ``start`` on as contiguous ranges of the full tensor.

        Each is the first element counted from ``start``, the first element in the full tensor, and the number
        of elements.
        """
        width, full_width = math.prod(self.sizes[1:]), math.prod(self.shape[1:])
        left = self.offset[1] if len(self.offset) > 1 else 0
        position, end = start, start + numel
        while position < end:
            row, column = divmod(position, width)
            count = end - position if width == full_width else min(width - column, end - position)
            yield position - start, (self.offset[0] + row) * full_width + left + column, count
            position += count


class TiledModule(nn.Module):
    """A layer made of ``tiles`` in a grid of ``rows`` and ``columns``. ``state_dict`` returns copies of the
    full tensors, as the plain layer has them, which ``load_state_dict`` expects."""

    def __init__(self, columns: Bounds, rows: Bounds) -> None:
        super().__init__()
        self._columns, self._rows = columns, rows
        self.tiles = nn.ModuleList()
        self.register_state_dict_post_hook(_merge)
        self.register_load_state_dict_pre_hook(_cut)

    def tile_offsets(self) -> list[tuple[Tile, tuple[int, int]]]:
        """Return every tile with its first row and column. Those of one row of the grid follow one another.

        Returns:
            Pairs of tile and offset, in the order of `tiles`.
        """
        offsets = [(first, left) for first, _ in self._rows for left, _ in self._columns]
        return list(zip(self.tiles, offsets, strict=True))  # type: ignore[arg-type]

    def full_shape(self) -> tuple[int, int]:
        """Return the shape of the full weight.

        Returns:
            Rows and columns.
        """
        return self._rows[-1][1], self._columns[-1][1]

    def tile_slices(self) -> Iterator[tuple[str, TileSlice]]:
        """Yield the name of every parameter within this module, and its slice of the full tensor."""
        shape = self.full_shape()
        for number, (tile, offset) in enumerate(self.tile_offsets()):
            for name, parameter in tile._parameters.items():
                if parameter is not None:
                    axes = parameter.dim()
                    found = TileSlice(name, shape[:axes], offset[:axes], tuple(parameter.shape))
                    yield f"tiles.{number}.{name}", found

    def cut(self, name: str, full: torch.Tensor, requires_grad: bool) -> list[nn.Parameter]:
        """Cut ``full``, the value of ``weight`` or ``bias``, into one parameter per tile.

        They share its memory if it is contiguous.
        """
        values = full.detach().contiguous()
        return [
            nn.Parameter(tile.view_in(values).data, requires_grad=requires_grad)
            for _, tile in self.tile_slices()
            if tile.name == name
        ]

    def set_tiles(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        """Make ``parameters`` the tiles' own ``weight`` or ``bias``, one after another.

        Raises ``ValueError`` if they are of other shapes than the tiles.
        """
        wanted = {inner: tile.sizes for inner, tile in self.tile_slices() if tile.name == name}
        sizes, shapes = list(wanted.values()), [tuple(each.shape) for each in parameters]
        if shapes != sizes:
            raise ValueError(
                f"{name}: expected tiles of shapes {sizes}, got {shapes}. "
                "Cut both layers into the same number of tiles."
            )
        for inner, parameter in zip(wanted, parameters, strict=True):
            setattr(self.get_submodule(inner.rpartition(".")[0]), name, parameter)

    def adopt(self, layer: nn.Module) -> None:
        """Make the tiles slices of the parameters of the plain ``layer``, and follow its mode."""
        for name, parameter in layer.named_parameters():
            self.set_tiles(name, self.cut(name, parameter, parameter.requires_grad))
        self.train(layer.training)


def _merge(module: TiledModule, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, tile in module.tile_slices():
        value = state.pop(prefix + name, None)
        if value is not None:
            key = prefix + tile.name
            if key not in state:
                state[key] = torch.empty(tile.shape, dtype=value.dtype, device=value.device)
            tile.view_in(state[key]).copy_(value.detach())


def _cut(module: TiledModule, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    errors = rest[-1]
    loaded = {name: state.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state}
    for name, tile in module.tile_slices():
        full = loaded.get(tile.name)
        if full is None:
            continue
        if tuple(full.shape) == tile.shape:
            state[prefix + name] = tile.view_in(full)
        else:
            errors.append(f"{prefix}{tile.name}: expected shape {tile.shape}, got {tuple(full.shape)}")
            del loaded[tile.name]


class FullTensorMap:
    """The full tensors of tiled layers and of parameters that are split over ranks, by full names.

    Any other parameter is its own full tensor. What is saved under a full tensor's name does not depend on
    how it is tiled or split.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slices: dict[str, TileSlice] = {}
        self._tiles: dict[str, list[str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for name, tile in module.tile_slices() if isinstance(module, TiledModule) else ():
                found = replace(tile, name=dot + tile.name)
                self._slices[dot + name] = found
                self._tiles.setdefault(found.name, []).append(dot + name)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            local = local_slice_of(parameter)
            if local is not None:
                self._slices[name] = TileSlice(name, *local)

    def tile_slice(self, name: str) -> TileSlice | None:
        """Return the slice that the parameter ``name`` is of its full tensor; None if it is all of it."""
        return self._slices.get(name)

    def name(self, name: str) -> str:
        """Return the name of the full tensor of the parameter ``name``."""
        found = self._slices.get(name)
        return name if found is None else found.name

    def names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the full tensors of ``names``, each once."""
        return list(dict.fromkeys(self.name(name) for name in names))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that is tiled."""
        return {name: self._slices[tiles[0]].shape for name, tiles in self._tiles.items()}

    def cut(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``state`` with views for the tiles instead of full tensors."""
        return {
            inner: value if inner == name else self._slices[inner].view_in(value)
            for name, value in state.items()
            for inner in self._tiles.get(name, [name])
        }

    def to_tiles(self, value: Any) -> Any:
        """Return JSON-like ``value`` with every entry under a full tensor's name repeated for its tiles."""
        if not isinstance(value, Mapping):
            return value
        return {
            inner: self.to_tiles(item)
            for name, item in value.items()
            for inner in self._tiles.get(name, [name])
        }

    def to_full(self, value: Any) -> Any:
        """Undo :meth:`to_tiles`. Raises ``RuntimeError`` if tiles of one tensor differ."""
        if not isinstance(value, Mapping):
            return value
        found: dict[str, Any] = {}
        for name, item in value.items():
            full, item = self.name(name), self.to_full(item)
            if found.setdefault(full, item) != item:
                raise RuntimeError(
                    f"tiles of '{full}': expected the same number of steps in each, got others, which one "
                    "name cannot say. Use every tile in every step (take all of TiledLinear.chunks)."
                )
        return found
