"""Adafactor over shards: squares of all ranks are summed over rows and columns, and no matrix is gathered."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import TIERS, Tier, is_stored
from zero_ext.offload import MASTER, Values
from zero_ext.optim.adafactor import (
    EXP_AVG,
    AdafactorSettings,
    FactoredLayout,
    adafactor_settings,
    is_factored,
    names_of,
)
from zero_ext.optim.fused import inside
from zero_ext.optim.moments import moment_fields
from zero_ext.optim.stepper import (
    CountingStepper,
    OwnedRange,
    Segment,
    StepperInputs,
    UnshardedState,
    Update,
    send_chunk,
    stored_chunks,
)

# Of a slice that is updated there are copies in fp32 and float64. A CPU keeps these in its cache. On an
# accelerator the launches of kernels decide. By whether it is a CPU.
_SLICE_ELEMENTS = (1 << 23, 1 << 17)

_Averages = tuple[torch.Tensor, ...]  # of rows and columns; or of this rank's elements of a vector


@dataclass
class _ParameterStep:
    """One step on one parameter: what is known before it, and what its two sums over the ranks add."""

    segment: Segment
    settings: AdafactorSettings
    layout: FactoredLayout | None  # None: a vector, or a parameter without elements
    averages: _Averages
    begin: int  # of its sums over rows, then columns, then of its own squares, in the table
    factors: tuple[torch.Tensor, torch.Tensor] | None = None
    rate: float = 0.0
    decay: float = 0.0

    def sums(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the slices of ``table`` for rows, columns and the squares of the parameter [1]."""
        rows, columns = self.layout.numels() if self.layout else (0, 0)
        parts = table[self.begin : self.begin + rows + columns + 1].split([rows, columns, 1])
        return parts[0], parts[1], parts[2]

    def apply_sums(self, table: torch.Tensor) -> None:
        """Average the squares of all ranks' gradients, which ``table`` has in host memory."""
        if self.layout is None:
            return
        rows, columns, _ = self.sums(table)
        found = (
            (self.layout.rows_of(rows), self.segment.shape[-1], self.averages[0]),
            (self.layout.columns_of(columns), self.segment.shape[-2], self.averages[1]),
        )
        row, column = (
            before.lerp((sums / count + self.settings.added).to(before), self.settings.weight)
            for sums, count, before in found
        )
        self.averages = row, column
        self.factors = self.layout.factors(self.settings.normalized(row), column)

    def update(self, gradient: torch.Tensor, first: int) -> torch.Tensor:
        """Return the update [n], neither clipped nor times the rate, by ``gradient`` [n]: that of this rank's
        elements from the one numbered ``first`` on."""
        if self.layout is not None and self.factors is not None:
            start = self.segment.start + first
            roots = self.layout.inverse_roots(self.settings, self.factors, start, gradient.numel())
        else:
            roots = self.settings.vector_root(self.averages[0][first : first + gradient.numel()])
        return roots.mul_(gradient)


class _RangeElements(NamedTuple):
    """Elements of the range ``number`` from ``begin`` on: their gradient, and state where it is read."""

    number: int
    begin: int
    gradient: torch.Tensor
    values: Mapping[str, torch.Tensor]
    device: torch.device  # of the state


class AdafactorStepper(CountingStepper):
    """``torch.optim.Adafactor`` and ``transformers.optimization.Adafactor``, on state in memory and on NVMe.

    The averages of rows and columns are equal on all ranks. Averages of squares of vectors are in memory by
    segment: ranges have other parameters too, and would need memory for all of their elements. Gradients are
    read three times: for the sums over rows and columns, for the RMS of the update, and for the step.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        if inputs.total is None:
            raise zero_ext_bug("rows and columns of all ranks without their sum")
        self._total = inputs.total
        averages_updates = any(group.get("beta1") is not None for group in self._groups)
        fields = moment_fields(inputs.moments_dtype, (EXP_AVG,) if averages_updates else ())
        self._kinds = (MASTER, *fields)
        self._layouts: dict[str, FactoredLayout | None] = {}
        self._averages: dict[str, _Averages] = {}
        self._snapshots: dict[int, dict[str, _Averages]] = {}
        for owned in self._ranges:
            for kind, field in fields.items():
                owned.state.add(kind, field)
            for segment in owned.segments:
                factored = is_factored(segment.shape)
                layout = FactoredLayout(segment.shape, segment.stride) if factored else None
                self._layouts[segment.name] = layout
                self._averages[segment.name] = self._zeros(owned, segment, layout)

    def _zeros(self, owned: OwnedRange, segment: Segment, layout: FactoredLayout | None) -> _Averages:
        device = self._device_of(owned)
        shapes = [layout.row_shape, layout.column_shape] if layout else [(segment.numel,)]
        return tuple(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes)

    def _device_of(self, owned: OwnedRange) -> torch.device:
        (moved,) = self._staging.to_tier(TIERS[owned.state.tier].near, torch.zeros(1, device="cpu"))
        return moved.device

    # -- a step -------------------------------------------------------------------------------------------

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective, before anything changes. Gradients may be fp32, bf16 or
        fp16."""
        steps, numel = self._begin(updates, used)
        table = self._total(lambda: self._squares(updates, scale, steps, numel))
        for each in steps.values():
            each.apply_sums(table)
        order = {name: number for number, name in enumerate(steps)}
        squares = self._total(lambda: self._update_squares(updates, scale, steps, order))
        for (name, each), update_square in zip(steps.items(), squares.tolist(), strict=True):
            count = max(1, _numel(each.segment))
            weight_rms = float(each.sums(table)[2] / count) ** 0.5
            each.rate, each.decay = each.settings.rates(weight_rms, (update_square / count) ** 0.5)
            self._steps[name] += 1
            self._averages[name] = each.averages
        yield from self._apply(updates, scale, steps)

    def _begin(
        self, updates: Sequence[Update], used: frozenset[str]
    ) -> tuple[dict[str, _ParameterStep], int]:
        """Return the step of each used parameter, the same on all ranks, and the length of the table of
        their sums."""
        steps: dict[str, _ParameterStep] = {}
        begin = 0
        for update in updates:
            for segment in self._ranges[update.index].segments:
                name = segment.name
                if name not in used:
                    continue
                settings = adafactor_settings(self._groups[segment.group], self._steps[name] + 1)
                layout, averages = self._layouts[name], self._averages[name]
                steps[name] = _ParameterStep(segment, settings, layout, averages, begin)
                begin += sum(layout.numels() if layout else ()) + 1
        return steps, begin

    def _squares(
        self, updates: Sequence[Update], scale: torch.Tensor, steps: Mapping[str, _ParameterStep], numel: int
    ) -> torch.Tensor:
        """Return the sums of this rank in host memory, after averaging the squares of its vectors."""
        tables = _Tables(numel)
        vectors: dict[str, list[torch.Tensor]] = {}
        reads_state = any(each.settings.scales for each in steps.values())
        for elements in self._range_elements(updates, reads_state):
            for (first, last), each in self._inside(elements, steps):
                gradient = _scaled(elements, first, last, scale, each.settings)
                rows, columns, weight = each.sums(tables.on(elements.device))
                if each.settings.scales:
                    weight.add_(_square_sum(elements.values[MASTER][first:last]))
                offset = elements.begin + first - each.segment.begin
                if each.layout is not None:
                    each.layout.add_squares(gradient, each.segment.start + offset, rows, columns)
                    continue
                before = each.averages[0][offset : offset + gradient.numel()]
                vectors.setdefault(each.segment.name, []).append(
                    each.settings.averaged_vector(before, gradient)
                )
        for name, found in vectors.items():
            steps[name].averages = (torch.cat(found),)
        return tables.total()

    def _update_squares(
        self,
        updates: Sequence[Update],
        scale: torch.Tensor,
        steps: Mapping[str, _ParameterStep],
        order: Mapping[str, int],
    ) -> torch.Tensor:
        tables = _Tables(len(order))
        for elements in self._range_elements(updates, reads_state=False):
            for (first, last), each in self._inside(elements, steps):
                gradient = _scaled(elements, first, last, scale, each.settings)
                update = each.update(gradient, elements.begin + first - each.segment.begin)
                tables.on(elements.device)[order[each.segment.name]].add_(_square_sum(update))
        return tables.total()

    def _apply(
        self, updates: Sequence[Update], scale: torch.Tensor, steps: Mapping[str, _ParameterStep]
    ) -> Iterator[int]:
        stored = [each for each in updates if is_stored(self._ranges[each.index].state.tier)]
        for update in updates:
            owned, output = self._ranges[update.index], self._ranges[update.index].output
            if update in stored:
                continue
            device = self._device_of(owned)
            for chunk in self._staging.chunks(owned.state.tier, update.gradient, output):
                read = owned.state.read_kinds(self._kinds, chunk.begin, chunk.end)
                values = dict(zip(self._kinds, read, strict=True))
                elements = _RangeElements(update.index, chunk.begin, chunk.gradient, values, device)
                bounds = self._descend(elements, scale, steps)
                if chunk.output is not None:
                    # All of a staged chunk is sent, so that storage need not be read.
                    for first, last in bounds if chunk.staged is None else [(0, chunk.end - chunk.begin)]:
                        chunk.output[first:last] = values[MASTER][first:last]
            yield update.index
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for each in chunks:
                state = each.state
                elements = _RangeElements(
                    state.index, state.begin, each.gradient, state.values, torch.device("cpu")
                )
                bounds = self._descend(elements, scale, steps)
                state.changed = True
                send_chunk(self._ranges[state.index].output, each, bounds)
        yield from (each.index for each in stored)

    def _descend(
        self, elements: _RangeElements, scale: torch.Tensor, steps: Mapping[str, _ParameterStep]
    ) -> list[tuple[int, int]]:
        """Step the master weights of ``elements``, and return the ranges that were stepped."""
        stepped = []
        for (first, last), each in self._inside(elements, steps):
            gradient = _scaled(elements, first, last, scale, each.settings)
            update = each.update(gradient, elements.begin + first - each.segment.begin)
            own, rate = elements.values[MASTER][first:last], each.rate
            if each.settings.beta1 is not None:
                average = elements.values[EXP_AVG][first:last]
                update = (
                    average.float()
                    .mul(each.settings.beta1)
                    .add_(update, alpha=(1 - each.settings.beta1) * rate)
                )
                average.copy_(update)
                rate = 1.0
            own.mul_(1 - each.decay).sub_(update, alpha=rate)
            if self._flag is not None:
                self._flag.check(own)
                if each.layout is None:
                    self._flag.check(each.averages[0])
            stepped.append((first, last))
        return stepped

    def _range_elements(self, updates: Sequence[Update], reads_state: bool) -> Iterator[_RangeElements]:
        """Yield all gradients, and with ``reads_state`` the state, in memory of the state's tier."""
        stored = []
        for update in updates:
            owned = self._ranges[update.index]
            tier, device = owned.state.tier, self._device_of(owned)
            if is_stored(tier):
                if reads_state:
                    stored.append(update)
                    continue
                tier = TIERS[update.gradient.tier].near  # staging memory of the host's is for state alone
            for chunk in self._staging.chunks(tier, update.gradient, None):
                read = owned.state.read_kinds(self._kinds, chunk.begin, chunk.end) if reads_state else ()
                values = dict(zip(self._kinds, read, strict=False))
                yield _RangeElements(update.index, chunk.begin, chunk.gradient, values, device)
        with contextlib.closing(stored_chunks(self._staging, self._ranges, stored)) as chunks:
            for each in chunks:
                state = each.state
                yield _RangeElements(
                    state.index, state.begin, each.gradient, state.values, torch.device("cpu")
                )

    def _inside(
        self, elements: _RangeElements, steps: Mapping[str, _ParameterStep]
    ) -> Iterator[tuple[tuple[int, int], _ParameterStep]]:
        """Yield those of ``elements``, counted from the first one, of each parameter that is stepped."""
        found = [
            (segment.begin, segment.end, steps[segment.name])
            for segment in self._ranges[elements.number].segments
            if segment.name in steps and segment.numel
        ]
        bounds, rows = [(begin, end) for begin, end, _ in found], [each for _, _, each in found]
        size = _SLICE_ELEMENTS[elements.device.type == "cpu"]
        covered = inside(elements.begin, elements.begin + elements.gradient.numel(), bounds, rows)
        for (begin, end), each in zip(*covered, strict=True):
            for first in range(begin, end, size):
                yield (first, min(first + size, end)), each

    # -- state --------------------------------------------------------------------------------------------

    def snapshot(self, index: int) -> None:
        """See :class:`Stepper`. A step replaces averages and leaves the earlier ones unchanged."""
        names = [segment.name for segment in self._ranges[index].segments]
        self._snapshots[index] = {name: self._averages[name] for name in names}
        super().snapshot(index)

    def rollback(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._averages.update(self._snapshots[index])
        super().rollback(index)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: averages of updates, and of the squares of vectors."""
        owned = self._ranges[index]
        for segment in owned.segments:
            group = self._groups[segment.group]
            if group.get("beta1") is not None:
                yield EXP_AVG, segment, owned.state.view(EXP_AVG, segment.begin, segment.end)
            if self._layouts[segment.name] is None:
                yield names_of(group).vector, segment, self._averages[segment.name][0]

    def unsharded_values(self) -> Iterator[UnshardedState]:
        """See :class:`Stepper`: averages of rows and of columns, equal on all ranks."""
        for owned in self._ranges:
            for segment in owned.segments:
                if self._layouts[segment.name] is not None:
                    names = names_of(self._groups[segment.group])
                    row, column = self._averages[segment.name]
                    if names.keepdim:
                        row, column = row.unsqueeze(-1), column.unsqueeze(-2)
                    yield UnshardedState(names.row, segment.name, row, replicated=True)
                    yield UnshardedState(names.column, segment.name, column, replicated=True)

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`: averages of rows, columns and squares of vectors."""
        nbytes: Counter[Tier] = Counter()
        for owned in self._ranges:
            for segment in owned.segments:
                tier = TIERS[owned.state.tier].near
                nbytes[tier] += sum(values.nbytes for values in self._averages[segment.name])
        return nbytes


class _Tables:
    """Float64 sums [numel]; each device adds up what it holds."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._tables: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the sums on ``device``."""
        if device not in self._tables:
            self._tables[device] = torch.zeros(self._numel, dtype=torch.float64, device=device)
        return self._tables[device]

    def total(self) -> torch.Tensor:
        """Return all of them in host memory; wait for the devices."""
        total = torch.zeros(self._numel, dtype=torch.float64, device="cpu")
        for table in self._tables.values():
            total += table.cpu()
        return total


def _square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of ``values`` [n] in float64, 0-d."""
    wide = values.double()
    return wide.dot(wide)


def _numel(segment: Segment) -> int:
    return torch.Size(segment.shape).numel()


def _scaled(
    elements: _RangeElements, first: int, last: int, scale: torch.Tensor, settings: AdafactorSettings
) -> torch.Tensor:
    """Return the gradient of [first, last) of ``elements`` as the optimizer takes it, in fp32."""
    gradient = elements.gradient[first:last].to(elements.device, torch.float32, copy=True)
    return gradient.mul_(scale.to(elements.device) * settings.sign)
