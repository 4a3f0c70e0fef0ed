"""What tiled layers share: in state dicts they are one weight and one bias under the plain layer's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zero_ext.zero.tiling.tile import Tile
from zero_ext.zero.tiling.tile_slice import Place


class Tiled(nn.Module):
    """A layer made of ``tiles``. ``state_dict`` gives copies of the whole tensors, ``load_state_dict`` wants
    them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = nn.ModuleList()
        self.register_state_dict_post_hook(_merge)
        self.register_load_state_dict_pre_hook(_cut)

    def corners(self) -> list[tuple[Tile, tuple[int, int]]]:
        """Every tile with its first row and column, in the order of ``tiles``."""
        raise AssertionError(f"{type(self).__name__} does not say where its tiles lie")

    def whole_shape(self) -> tuple[int, int]:
        """Shape of the whole weight."""
        raise AssertionError(f"{type(self).__name__} does not say how large it is")

    def places(self) -> Iterator[tuple[str, Place]]:
        """The name of every parameter within this module, and where it belongs."""
        shape = self.whole_shape()
        for number, (tile, corner) in enumerate(self.corners()):
            for name, parameter in tile._parameters.items():
                if parameter is not None:
                    axes = parameter.dim()
                    place = Place(name, shape[:axes], corner[:axes], tuple(parameter.shape))
                    yield f"tiles.{number}.{name}", place

    def cut(self, name: str, whole: torch.Tensor, requires_grad: bool) -> list[nn.Parameter]:
        """``whole``, the values of ``weight`` or ``bias``, as one parameter a tile. They share its memory,
        unless its elements do not lie row by row."""
        values = whole.detach().contiguous()
        return [
            nn.Parameter(place.part_of(values).data, requires_grad=requires_grad)
            for _, place in self.places()
            if place.name == name
        ]

    def take(self, name: str, parts: Sequence[nn.Parameter]) -> None:
        """Makes ``parts`` the tiles' own ``weight`` or ``bias``, one after another.

        Raises ``ValueError`` if they are of other shapes than the tiles.
        """
        wanted = [(inner, place.sizes) for inner, place in self.places() if place.name == name]
        shapes = [tuple(part.shape) for part in parts]
        if shapes != [sizes for _, sizes in wanted]:
            raise ValueError(
                f"{name}: tiles of shapes {shapes} given, {[sizes for _, sizes in wanted]} wanted; cut both "
                "layers into the same number of tiles"
            )
        for (inner, _), part in zip(wanted, parts, strict=True):
            setattr(self.get_submodule(inner.rpartition(".")[0]), name, part)


def _merge(module: Tiled, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, place in module.places():
        part = state.pop(prefix + name, None)
        if part is not None:
            key = prefix + place.name
            if key not in state:
                state[key] = torch.empty(place.shape, dtype=part.dtype, device=part.device)
            place.part_of(state[key]).copy_(part.detach())


def _cut(module: Tiled, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    errors = rest[-1]
    given = {name: state.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state}
    for name, place in module.places():
        whole = given.get(place.name)
        if whole is None:
            continue
        if tuple(whole.shape) == place.shape:
            state[prefix + name] = place.part_of(whole)
        else:
            errors.append(f"{prefix}{place.name} has shape {tuple(whole.shape)}, {place.shape} wanted")
            del given[place.name]
