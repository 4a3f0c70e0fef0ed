"""``TiledLinear`` and ``TiledEmbedding``: layers that are gathered one tile at a time."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from zero_ext.comm import Collectives
from zero_ext.zero.tiling.tiled_module import Tile, TiledModule, bounds


class LinearTile(Tile):
    """``rows`` outputs from ``columns`` inputs: weight [rows, columns], bias [rows] or None.

    ``fan_in`` is the number of inputs of the full layer, which sets the range of initial values.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        fan_in: int,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fan_in = fan_in
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from the distribution that ``nn.Linear`` draws from."""
        bound = 1 / math.sqrt(self.fan_in)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., columns] to [..., rows]."""
        return functional.linear(inputs, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the tile's sizes."""
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}"


class EmbeddingTile(Tile):
    """``rows`` consecutive rows of an embedding: weight [rows, width]. ``padding_row`` counts within them."""

    def __init__(
        self,
        rows: int,
        width: int,
        padding_row: int | None,
        scale_grad_by_freq: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.padding_row = padding_row
        self.scale_grad_by_freq = scale_grad_by_freq
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from the distribution that ``nn.Embedding`` draws from."""
        nn.init.normal_(self.weight)
        if self.padding_row is not None:
            with torch.no_grad():
                self.weight[self.padding_row].zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Row numbers [n] within the tile to their values [n, width]."""
        return self._look_up(rows, self.weight)

    def nothing(self, rows: torch.Tensor) -> torch.Tensor:
        """Values [0, width] of no rows [0], with a zero gradient for the weight: read without gathering it,
        which a look-up through :meth:`forward` would do."""
        (weight,) = self.parameters()
        # Nothing of the value is read, so a released weight need not be fetched.
        with torch._C.DisableTorchFunctionSubclass():
            return self._look_up(rows, weight)

    def _look_up(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.embedding(
            rows, weight, self.padding_row, scale_grad_by_freq=self.scale_grad_by_freq
        )

    def extra_repr(self) -> str:
        """Return the tile's sizes."""
        return f"{tuple(self.weight.shape)}, padding_row={self.padding_row}"


class LookUpSum:
    """Sums the look-ups of each tile over the ranks, a collective. Its deep copy is None: a copied model runs
    on one rank."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, counts: torch.Tensor) -> torch.Tensor:
        # The sum is made in place, and the caller still splits its ids by this rank's own counts.
        return self._collectives.sum_(counts.clone(), "look-ups in the tiles of an embedding")


def arguments_of(layer: nn.Linear | nn.Embedding) -> dict[str, Any]:
    """Return the arguments, besides its splits, of a tiled layer of the sizes of ``layer`` without values."""
    found = {"device": "meta", "dtype": layer.weight.dtype}
    if isinstance(layer, nn.Linear):
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
        return {**found, **sizes, "bias": layer.bias is not None}
    names = ("num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq")
    return {**found, **{name: getattr(layer, name) for name in names}}


class TiledEmbedding(TiledModule):
    """`nn.Embedding` with rows cut into `splits` tiles of nearly equal size.

    In stage 3 every tile is a unit, gathered only if some rank looks up a row of it, and never in backward.
    Values and gradients are those of `nn.Embedding`, bit for bit. So is the `state_dict`, with one
    `weight` [num_embeddings, embedding_dim]. Rows that nobody looks up get zero gradients, as there.

    Args:
        num_embeddings: rows.
        embedding_dim: elements of a row.
        splits: number of tiles.
        padding_idx: row that gets no gradient and is zero at the start; negative numbers count from the end.
        scale_grad_by_freq: divide a row's gradient by how often it occurs in the batch.
        device: where the weights are made.
        dtype: of the weights; default torch's.

    Raises:
        ValueError: `splits` is not from 1 to `num_embeddings`, or `padding_idx` is outside the rows.

    Examples:
        >>> embedding = zero_ext.TiledEmbedding(10, 4, splits=3)
        >>> embedding(torch.tensor([[0, 9]])).shape
        torch.Size([1, 2, 4])
        >>> list(embedding.state_dict())
        ['weight']
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        splits: int = 1,
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__([(0, embedding_dim)], bounds(num_embeddings, splits, "splits"))
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.consensus: LookUpSum | None = None
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx: expected one of the {num_embeddings} rows or None, got {padding_idx}. "
                    "Choose a row of the table."
                )
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        for first, last in self._rows:
            inside = padding_idx is not None and first <= padding_idx < last
            padding_row = padding_idx - first if padding_idx is not None and inside else None
            self.tiles.append(
                EmbeddingTile(last - first, embedding_dim, padding_row, scale_grad_by_freq, device, dtype)
            )

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, splits: int) -> TiledEmbedding:
        """Return the same layer, tiled. The tiles share the memory of `embedding`'s weight.

        Drop `embedding`, or train only one of the two.

        Args:
            embedding: the plain layer.
            splits: number of tiles.

        Returns:
            The tiled layer, in training mode if `embedding` is.

        Raises:
            ValueError: `embedding` has `max_norm`, which rewrites rows in forward, or sparse gradients. Or
                `splits` is not from 1 to its number of rows.
        """
        for name in ("max_norm", "sparse"):
            if getattr(embedding, name):
                raise ValueError(
                    f"{name}: expected the default, got {getattr(embedding, name)}, which tiles cannot "
                    "have. Leave the layer out of units.tiles."
                )
        made = cls(**arguments_of(embedding), splits=splits)
        made.adopt(embedding)
        return made

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: [...] int64 or int32.

        Returns:
            [..., embedding_dim], the rows.

        Raises:
            IndexError: an id is outside the rows.
        """
        flat = ids.reshape(-1)
        low, high = (int(bound) for bound in flat.aminmax()) if flat.numel() else (0, 0)
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(
                f"TiledEmbedding: expected ids from 0 to {self.num_embeddings - 1}, got {low} to "
                f"{high}. Check the vocabulary of the tokenizer."
            )
        ends = torch.tensor([last for _, last in self._rows], device=flat.device)
        tile_of = torch.bucketize(flat, ends, right=True)
        counts = torch.bincount(tile_of, minlength=len(self._rows))
        wanted = counts if self.consensus is None else self.consensus(counts)
        # Stable, so that gradients of a row that occurs twice add up in the order they do without tiles.
        order = tile_of.argsort(stable=True)
        ids_of_tiles = flat[order].split(counts.tolist())
        tiles = cast("list[EmbeddingTile]", list(self.tiles))
        values = [
            tile(rows - first) if looked_up else tile.nothing(rows)
            for tile, (first, _), rows, looked_up in zip(
                tiles, self._rows, ids_of_tiles, wanted.tolist(), strict=True
            )
        ]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return torch.cat(values).index_select(0, back).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return sizes, splits and padding as `repr` shows them.

        Returns:
            The text between the parentheses.
        """
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, splits={len(self._rows)}{padding}"


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
        super().__init__(
            bounds(in_features, in_splits, "in_splits"), bounds(out_features, out_splits, "out_splits")
        )
        self.in_features = in_features
        self.out_features = out_features
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
        made = cls(**arguments_of(linear), in_splits=in_splits, out_splits=out_splits)
        made.adopt(linear)
        return made

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
        """
        sizes = [right - left for left, right in self._columns]
        columns = inputs.split(sizes, dim=-1) if len(sizes) > 1 else (inputs,)
        tiles = iter(self.tiles)
        for _ in self._rows:
            # A view for each tile: its gradient is complete as soon as the tile is done, so that the tile can
            # go. That of the input itself comes after the last tile's.
            row = zip(columns, tiles, strict=False)
            yield functools.reduce(operator.add, (tile(column.view_as(column)) for column, tile in row))

    def extra_repr(self) -> str:
        """Return sizes and splits as `repr` shows them.

        Returns:
            The text between the parentheses.
        """
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"in_splits={len(self._columns)}, out_splits={len(self._rows)}"
        )


def set_tile_consensus(model: nn.Module, collectives: Collectives | None) -> None:
    """Make every tiled embedding of ``model`` gather what any rank looks up, or without ``collectives`` what
    this one does."""
    for module in model.modules():
        if isinstance(module, TiledEmbedding):
            module.consensus = (
                LookUpSum(collectives) if collectives is not None and collectives.world_size > 1 else None
            )
