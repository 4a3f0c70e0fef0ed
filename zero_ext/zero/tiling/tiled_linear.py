"""``TiledLinear``: a linear layer that is gathered one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.tiling.tile import LinearTile, Tile
from zero_ext.zero.tiling.tile_slice import bounds
from zero_ext.zero.tiling.tiled_module import TiledModule

if TYPE_CHECKING:
    from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding


class TiledLinear(TiledModule):
    """`nn.Linear` cut into `out_splits` x `in_splits` tiles of nearly equal size.

    In stage 3 every tile is a unit: forward and backward gather one after another. Tiles of outputs are
    concatenated, tiles of inputs are added from the first to the last. The gradient of the input is a sum
    over `out_splits`, the output one over `in_splits`: equal to the plain layer's up to rounding.
    `state_dict` has the plain layer's `weight` [out_features, in_features] and `bias` [out_features].

    Source: memory-centric tiling, Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857), section 5.1.3.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether there is one.
        in_splits: tiles along the inputs.
        out_splits: tiles along the outputs.
        device: where the weights are made.
        dtype: of the weights; default torch's.

    Raises:
        ValueError: the splits are not from 1 to the number of features.

    Examples:
        >>> layer = zero_ext.TiledLinear(8, 6, in_splits=2, out_splits=3)
        >>> layer(torch.zeros(5, 8)).shape
        torch.Size([5, 6])
        >>> layer.state_dict()["weight"].shape
        torch.Size([6, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._columns = bounds(in_features, in_splits, "in_splits")
        self._rows = bounds(out_features, out_splits, "out_splits")
        for first, last in self._rows:
            for left, right in self._columns:
                own_bias = bias and left == 0
                self.tiles.append(
                    LinearTile(last - first, right - left, in_features, own_bias, device, dtype)
                )

    @classmethod
    def from_linear(cls, linear: nn.Linear, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """Return the same layer, tiled. The tiles share the memory of `linear`'s weight.

        Drop `linear`, or train only one of the two.

        Args:
            linear: the plain layer.
            in_splits: tiles along the inputs.
            out_splits: tiles along the outputs.

        Returns:
            The tiled layer, in training mode if `linear` is.

        Raises:
            ValueError: the splits are not from 1 to the number of features.
        """
        sizes = (linear.in_features, linear.out_features, linear.bias is not None, in_splits, out_splits)
        made = cls(*sizes, device="meta", dtype=linear.weight.dtype)
        for name, parameter in linear.named_parameters():
            made.set_tiles(name, made.cut(name, parameter, parameter.requires_grad))
        return made.train(linear.training)

    @classmethod
    def tied_to(cls, embedding: TiledEmbedding, bias: bool = False) -> TiledLinear:
        """Return a head [embedding_dim] to [num_embeddings] with the tiles of `embedding`.

        Args:
            embedding: the layer that the head shares weights with.
            bias: give the head a bias, zero at the start.

        Returns:
            The head.
        """
        weights = [tile.weight for tile, _ in embedding.tile_offsets()]
        shape = (embedding.embedding_dim, embedding.num_embeddings)
        made = cls(*shape, False, 1, len(weights), device="meta", dtype=weights[0].dtype)
        made.set_tiles("weight", weights)
        if bias:
            for tile, weight in zip(made.tiles, weights, strict=True):
                zeros = torch.zeros(len(weight), device=weight.device, dtype=weight.dtype)
                tile.bias = nn.Parameter(zeros)
        return made

    def tile_offsets(self) -> list[tuple[Tile, tuple[int, int]]]:
        """Return every tile with its first row and column.

        Returns:
            Pairs of tile and offset; the tiles of one row of the grid follow one another.
        """
        offsets = [(first, left) for first, _ in self._rows for left, _ in self._columns]
        return list(zip(self.tiles, offsets, strict=True))  # type: ignore[arg-type]

    def full_shape(self) -> tuple[int, int]:
        """Return the shape of the full weight.

        Returns:
            `out_features` and `in_features`.
        """
        return self.out_features, self.in_features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            inputs: [..., in_features].

        Returns:
            [..., out_features].
        """
        return torch.cat(list(self.chunks(inputs)), dim=-1)

    def chunks(self, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the output one tile at a time, for a loss that needs no more.

        Use all of them, on all ranks.

        Args:
            inputs: [..., in_features].

        Yields:
            [..., rows of the tile], from the first row of tiles to the last.

        Raises:
            AssertionError: an internal invariant is broken, which is a bug of zero_ext.
        """
        sizes = [right - left for left, right in self._columns]
        columns = inputs.split(sizes, dim=-1) if len(sizes) > 1 else (inputs,)
        for row in range(len(self._rows)):
            output: torch.Tensor | None = None
            for number, column in enumerate(columns):
                tile = self.tiles[row * len(columns) + number]
                # A view for each tile: its gradient is complete as soon as the tile is done, so that the tile
                # can go. That of the input itself comes after the last tile's.
                value = tile(column.view_as(column))
                output = value if output is None else output + value
            if output is None:
                raise zero_ext_bug("a layer without tiles")
            yield output

    def extra_repr(self) -> str:
        """Return sizes and splits as `repr` shows them.

        Returns:
            The text between the parentheses.
        """
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"in_splits={len(self._columns)}, out_splits={len(self._rows)}"
        )
