"""Names, shapes and values of full tensors from those of tiles and DTensor slices, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_ext.zero.tiling.tile_slice import TileSlice
from zero_ext.zero.tiling.tiled_module import TiledModule
from zero_ext.zero.units.dtensor_local import local_slice_of


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

    def tiles(self, name: str) -> list[str]:
        """Return the names of the parameters that make up the tensor ``name``."""
        return self._tiles.get(name, [name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that is tiled."""
        return {name: self._slices[tiles[0]].shape for name, tiles in self._tiles.items()}

    def cut(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``state`` with views for the tiles instead of full tensors."""
        found = {}
        for name, value in state.items():
            for inner in self.tiles(name):
                tile = self._slices.get(inner)
                found[inner] = value if tile is None or name == inner else tile.view_in(value)
        return found

    def to_tiles(self, value: Any) -> Any:
        """Return JSON-like ``value`` with every entry under a full tensor's name repeated for its tiles."""
        if not isinstance(value, Mapping):
            return value
        return {inner: self.to_tiles(item) for name, item in value.items() for inner in self.tiles(name)}

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
