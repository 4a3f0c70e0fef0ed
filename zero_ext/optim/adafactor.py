"""Adafactor (Shazeer and Stern, arXiv 1804.04235) as torch and transformers have it: settings of a step, and
sums over rows and columns of slices of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

EXP_AVG = "exp_avg"


class StateNames(NamedTuple):
    """Names of the averages of squares: of rows, of columns, and of the elements of vectors. ``keepdim``
    says that the averaged dimension is there, of size 1."""

    row: str
    column: str
    vector: str
    keepdim: bool


_TORCH = StateNames("row_var", "col_var", "variance", keepdim=True)
_TRANSFORMERS = StateNames("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", keepdim=False)


def is_transformers(group: Mapping[str, Any]) -> bool:
    """Return whether a param group is one of ``transformers.optimization.Adafactor``."""
    return "clip_threshold" in group


def names_of(group: Mapping[str, Any]) -> StateNames:
    """Return the names that the class of a param group gives to its state."""
    return _TRANSFORMERS if is_transformers(group) else _TORCH


def is_factored(shape: Sequence[int]) -> bool:
    """Return whether a parameter [shape] has averages of rows and columns instead of one of its elements."""
    return len(shape) >= 2 and 0 not in shape


class AdafactorSettings(NamedTuple):
    """The numbers of one step on one parameter, before the RMS of the parameter and of the update are known.

    Args:
        weight: of this step's squares in their averages.
        added: to every square.
        floor: of the estimated variance's root. None: there is none.
        rate: learning rate.
        decay: part of the weights that is subtracted. ``scales_decay``: times their RMS.
        scales: whether the rate is multiplied with the RMS of the parameter, which is ``least_rms`` or more.
        threshold: of the update's RMS, above which it is clipped.
        beta1: of the average of updates. None: there is none.
        sign: of the gradient.
    """

    weight: float
    added: float
    floor: float | None
    rate: float
    decay: float
    scales_decay: bool
    scales: bool
    least_rms: float
    threshold: float
    beta1: float | None
    sign: float

    def rates(self, weight_rms: float, update_rms: float) -> tuple[float, float]:
        """Return the factor of the update, and the part of the weights that is subtracted.

        Args:
            weight_rms: root mean square of the parameter.
            update_rms: root mean square of the update.
        """
        scale = max(self.least_rms, weight_rms) if self.scales else 1.0
        decay = self.decay * scale if self.scales_decay else self.decay
        excess = update_rms / self.threshold if self.threshold else math.inf
        # Unlike ``max``, this keeps NaN.
        return self.rate * scale / (1.0 if excess <= 1.0 else excess), decay

    def inverse_root(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the inverse root of the estimated variance, by normalized rows and by columns, which
        broadcast; in any order."""
        if self.floor is None:
            return one.rsqrt() * other.rsqrt()
        return (one * other).clamp_(min=self.floor**2).rsqrt_()

    def normalized(self, row: torch.Tensor) -> torch.Tensor:
        """Return the averages of rows [..., m], of each matrix divided by their mean."""
        mean = row.mean(dim=-1, keepdim=True)
        return row / (mean if self.floor is None else mean.clamp_(min=self.floor))

    def averaged_vector(self, average: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the average of squares [n] after this step's ``gradient`` [n]."""
        return average.lerp(gradient.square().add_(self.added), self.weight)

    def vector_root(self, average: torch.Tensor) -> torch.Tensor:
        """Return the inverse root of the average of squares [n]."""
        return (average if self.floor is None else average.clamp(min=self.floor**2)).rsqrt()


def adafactor_settings(group: Mapping[str, Any], step: int) -> AdafactorSettings:
    """Return the numbers of step ``step``, from 1 on, by a param group of either class."""
    if not is_transformers(group):
        lr, (eps, least_rms) = float(group["lr"]), group["eps"]
        return AdafactorSettings(
            weight=step ** group["beta2_decay"],
            added=0.0,
            floor=torch.finfo(torch.float32).eps if eps is None else eps,
            rate=min(lr, step**-0.5),
            decay=lr * group["weight_decay"],
            scales_decay=False,
            scales=True,
            least_rms=least_rms,
            threshold=group["d"],
            beta1=None,
            sign=-1.0 if group["maximize"] else 1.0,
        )
    eps, least_rms = group["eps"]
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
    return AdafactorSettings(
        weight=step ** group["decay_rate"],
        added=eps,
        floor=None,
        rate=float(rate),
        decay=group["weight_decay"] * float(rate),
        scales_decay=True,
        scales=bool(group["scale_parameter"]),
        least_rms=least_rms,
        threshold=group["clip_threshold"],
        beta1=group["beta1"],
        sign=1.0,
    )


class _LineRange(NamedTuple):
    """Whole lines that have the elements [begin, end) of a slice, from ``padding`` on: those from ``line``
    on, ``lines`` of them, of each of ``blocks`` blocks from ``block`` on."""

    begin: int
    end: int
    padding: int
    block: int
    blocks: int
    line: int
    lines: int


class FactoredLayout:
    """The memory order of a parameter that is factored in its last two dimensions: [block, outer, between,
    inner, rest]. ``outer`` and ``inner`` are rows and columns, or columns and rows. The others are all
    dimensions around them.

    Args:
        shape: of the parameter, with at least two dimensions and one element.
        stride: of the parameter, dense.
    """

    def __init__(self, shape: Sequence[int], stride: Sequence[int]) -> None:
        last = len(shape) - 1
        self._order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
        self._shape = tuple(shape)
        first, second = sorted((self._order.index(last - 1), self._order.index(last)))
        sizes = [shape[dim] for dim in self._order]
        between, rest = math.prod(sizes[first + 1 : second]), math.prod(sizes[second + 1 :])
        self._extents = (math.prod(sizes[:first]), sizes[first], between, sizes[second], rest)
        self.row_shape, self.column_shape = self._shape[:-1], (*self._shape[:-2], self._shape[-1])
        self._rows_first = self._order.index(last - 1) == first

    def numels(self) -> tuple[int, int]:
        """Return the numbers of rows and of columns, of all matrices."""
        return math.prod(self.row_shape), math.prod(self.column_shape)

    def add_squares(
        self, values: torch.Tensor, start: int, rows: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """Add the squares of ``values`` [n], the elements from ``start`` on, to float64 sums over rows and
        columns, which :meth:`rows_of` and :meth:`columns_of` read."""
        outer, inner = self._by_lines(rows, columns)
        for span in self._line_ranges(start, values.numel()):
            _, _, *line = self._extents
            # Sums that also convert are 20 times slower on a CPU.
            numel = span.blocks * span.lines * math.prod(line)
            squares = torch.zeros(numel, dtype=torch.float64, device=values.device)
            own = squares[span.padding : span.padding + span.end - span.begin]
            own.copy_(values[span.begin : span.end]).square_()
            squares = squares.view(span.blocks, span.lines, *line)
            blocks = slice(span.block, span.block + span.blocks)
            outer[blocks, span.line : span.line + span.lines].add_(squares.sum(3))
            inner[blocks].add_(squares.sum(1))

    def rows_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums over rows [row_shape] as :meth:`add_squares` has added them up."""
        return self._in_dims(sums, len(self._shape) - 1, self.row_shape)

    def columns_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums over columns [column_shape] as :meth:`add_squares` has added them up."""
        return self._in_dims(sums, len(self._shape) - 2, self.column_shape)

    def factors(self, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values by row [row_shape] and by column [column_shape] as :meth:`inverse_roots` takes
        them."""
        dims = len(self._shape)
        row, column = self._in_order(row, dims - 1), self._in_order(column, dims - 2)
        outer, inner = self._by_lines(row, column)
        return outer.unsqueeze(3), inner.unsqueeze(1)

    def inverse_roots(
        self,
        settings: AdafactorSettings,
        factors: tuple[torch.Tensor, torch.Tensor],
        start: int,
        numel: int,
    ) -> torch.Tensor:
        """Return what the gradient [numel] from element ``start`` on is multiplied with."""
        outer, inner = factors
        found = []
        for span in self._line_ranges(start, numel):
            blocks = slice(span.block, span.block + span.blocks)
            lines = outer[blocks, span.line : span.line + span.lines]
            values = settings.inverse_root(lines, inner[blocks])
            found.append(values.reshape(-1)[span.padding : span.padding + span.end - span.begin])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _by_lines(self, row: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is by row and what by column, flat in memory order, as [block, outer, between, rest]
        and [block, between, inner, rest]."""
        block, outer, between, inner, rest = self._extents
        first, second = (row, column) if self._rows_first else (column, row)
        return first.view(block, outer, between, rest), second.view(block, between, inner, rest)

    def _dims_without(self, dropped: int) -> list[int]:
        """Return the order in memory of the dimensions but ``dropped``, counted without it."""
        return [dim - (dim > dropped) for dim in self._order if dim != dropped]

    def _in_order(self, values: torch.Tensor, dropped: int) -> torch.Tensor:
        return values.permute(self._dims_without(dropped)).reshape(-1)

    def _in_dims(self, values: torch.Tensor, dropped: int, shape: Sequence[int]) -> torch.Tensor:
        order = self._dims_without(dropped)
        ordered = values.view([shape[dim] for dim in order])
        return ordered.permute([order.index(dim) for dim in range(len(order))]).contiguous()

    def _line_ranges(self, start: int, numel: int) -> Iterator[_LineRange]:
        """Yield the slice [start, start + numel) in parts: whole blocks, and the lines of incomplete
        ones."""
        _, lines, *line = self._extents
        width = math.prod(line)
        position, end = start, start + numel
        while position < end:
            block, inside = divmod(position, lines * width)
            blocks = 0 if inside else (end - position) // (lines * width)
            stop = min(end, (block + max(blocks, 1)) * lines * width)
            if blocks:
                yield _LineRange(position - start, stop - start, 0, block, blocks, 0, lines)
            else:
                first, last = inside // width, -(-(stop - block * lines * width) // width)
                padding = inside - first * width
                yield _LineRange(position - start, stop - start, padding, block, 1, first, last - first)
            position = stop
