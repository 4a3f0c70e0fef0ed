"""Tiles: modules that own one slice of a layer's weight."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from zero_ext.config.internal_error import zero_ext_bug


class Tile(nn.Module):
    """A slice of a layer's weight, and a unit of its own where parameters are sharded.

    Called with inputs that need no gradient it does not read its parameters in backward, so they need not
    be gathered there.
    """

    weight: nn.Parameter


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
        (weight,) = self._parameters.values()
        if weight is None:
            raise zero_ext_bug("an embedding tile without weight")
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
