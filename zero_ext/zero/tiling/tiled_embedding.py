"""``TiledEmbedding``: an embedding that gathers only the tiles that are looked up."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.tiling.tile import EmbeddingTile, Tile
from zero_ext.zero.tiling.tile_slice import bounds
from zero_ext.zero.tiling.tiled_module import TiledModule


class TileConsensus(Protocol):
    """Turns this rank's number of look-ups in each tile [tiles] int64 into one that is 0 on all ranks or on
    none."""

    def __call__(self, counts: torch.Tensor, /) -> torch.Tensor: ...


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
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.consensus: TileConsensus | None = None
        self._rows = bounds(num_embeddings, splits, "splits")
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
        weight = embedding.weight
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            splits,
            embedding.padding_idx,
            embedding.scale_grad_by_freq,
            "meta",
            weight.dtype,
        )
        made.set_tiles("weight", made.cut("weight", weight, weight.requires_grad))
        return made.train(embedding.training)

    def tile_offsets(self) -> list[tuple[Tile, tuple[int, int]]]:
        """Return every tile with its first row and column.

        Returns:
            Pairs of tile and offset, in the order of `tiles`.
        """
        offsets = [(first, 0) for first, _ in self._rows]
        return list(zip(self.tiles, offsets, strict=True))  # type: ignore[arg-type]

    def full_shape(self) -> tuple[int, int]:
        """Return the shape of the full weight.

        Returns:
            `num_embeddings` and `embedding_dim`.
        """
        return self.num_embeddings, self.embedding_dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: [...] int64 or int32.

        Returns:
            [..., embedding_dim], the rows.

        Raises:
            IndexError: an id is outside the rows.
            AssertionError: an internal invariant is broken, which is a bug of zero_ext.
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
        values = []
        for (tile, (first, _)), rows, looked_up in zip(
            self.tile_offsets(), ids_of_tiles, wanted.tolist(), strict=True
        ):
            if not isinstance(tile, EmbeddingTile):
                raise zero_ext_bug(f"{type(tile).__name__} in an embedding")
            values.append(tile(rows - first) if looked_up else tile.nothing(rows))
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
