"""From the parameters of tiles to the tensors they were cut from, and back: names, shapes, values, runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zero_ext.zero.tiling.tile_slice import Place
from zero_ext.zero.tiling.tiled_module import Tiled
from zero_ext.zero.units.dtensor_local import box_of


class Wholes:
    """The whole tensors of all tiled layers of a model and of parameters that are split over ranks, by full
    names; others are their own whole. What is saved under a whole tensor's name does not depend on how it is
    tiled or split."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, Place] = {}
        self._tiles: dict[str, list[str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for name, place in module.places() if isinstance(module, Tiled) else ():
                whole = Place(dot + place.name, place.shape, place.corner, place.sizes)
                self._places[dot + name] = whole
                self._tiles.setdefault(whole.name, []).append(dot + name)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            box = box_of(parameter)
            if box is not None:
                self._places[name] = Place(name, *box)

    def place(self, name: str) -> Place | None:
        """Where the parameter ``name`` belongs in its whole tensor; None if it is no tile."""
        return self._places.get(name)

    def name(self, name: str) -> str:
        """The name of the whole tensor of the parameter ``name``."""
        place = self._places.get(name)
        return name if place is None else place.name

    def names(self, names: Iterable[str]) -> list[str]:
        """The names of the whole tensors of ``names``, each once."""
        return list(dict.fromkeys(self.name(name) for name in names))

    def tiles(self, name: str) -> list[str]:
        """The names of the parameters that make up the tensor ``name``."""
        return self._tiles.get(name, [name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that is tiled."""
        return {name: self._places[tiles[0]].shape for name, tiles in self._tiles.items()}

    def cut(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``state`` with views for the tiles in place of whole tensors."""
        found = {}
        for name, value in state.items():
            for inner in self.tiles(name):
                place = self._places.get(inner)
                found[inner] = value if place is None or name == inner else place.part_of(value)
        return found

    def to_tiles(self, value: Any) -> Any:
        """JSON-like ``value`` in which every entry under a whole tensor's name stands under its tiles'."""
        if not isinstance(value, Mapping):
            return value
        return {inner: self.to_tiles(item) for name, item in value.items() for inner in self.tiles(name)}

    def to_wholes(self, value: Any) -> Any:
        """Takes back :meth:`to_tiles`. Raises ``RuntimeError`` if tiles of one tensor differ."""
        if not isinstance(value, Mapping):
            return value
        found: dict[str, Any] = {}
        for name, item in value.items():
            whole, item = self.name(name), self.to_wholes(item)
            if found.setdefault(whole, item) != item:
                raise RuntimeError(
                    f"the tiles of '{whole}' differ in their numbers of steps, which one name cannot say; "
                    "use every tile in every step (take all of TiledLinear.chunks)"
                )
        return found
