"""Base class of tiled layers. Their state dicts have one weight and one bias, as the plain layer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.tiling.tile import Tile
from zero_ext.zero.tiling.tile_slice import TileSlice


class TiledModule(nn.Module):
    """A layer made of ``tiles``. ``state_dict`` returns copies of the full tensors, which
    ``load_state_dict`` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = nn.ModuleList()
        self.register_state_dict_post_hook(_merge)
        self.register_load_state_dict_pre_hook(_cut)

    def tile_offsets(self) -> list[tuple[Tile, tuple[int, int]]]:
        """Return every tile with its first row and column, in the order of ``tiles``."""
        raise zero_ext_bug(f"{type(self).__name__} does not define the offsets of its tiles")

    def full_shape(self) -> tuple[int, int]:
        """Return the shape of the full weight."""
        raise zero_ext_bug(f"{type(self).__name__} does not define its shape")

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
        wanted = [(inner, tile.sizes) for inner, tile in self.tile_slices() if tile.name == name]
        shapes = [tuple(each.shape) for each in parameters]
        if shapes != [sizes for _, sizes in wanted]:
            raise ValueError(
                f"{name}: expected tiles of shapes {[sizes for _, sizes in wanted]}, got {shapes}. "
                "Cut both layers into the same number of tiles."
            )
        for (inner, _), parameter in zip(wanted, parameters, strict=True):
            setattr(self.get_submodule(inner.rpartition(".")[0]), name, parameter)


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
