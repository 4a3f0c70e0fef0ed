"""Gradients of one unit: the full local sum of a backward pass, and the reduced shard the step reads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, Pending
from zero_ext.config import Tier, ZeroConfig
from zero_ext.offload import ShardHome, Tiers
from zero_ext.zero.construction.grouping import DTYPES
from zero_ext.zero.gradients.gradient_storage import (
    BorrowedGradients,
    GradientHome,
    SliceGradients,
    Taken,
)
from zero_ext.zero.gradients.reduce_scatter import GradientExchange, gradient_exchange
from zero_ext.zero.gradients.squared_norms import Squares
from zero_ext.zero.gradients.tiered_storage import sharded_home
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import Purpose
from zero_ext.zero.units.unit import Unit

_LARGE_BYTES = 64 << 10  # of a gradient: as long to copy on a CPU as a call takes


class UnitGradients:
    """Collects, reduces and keeps the gradients of ``unit``.

    ``local`` [layout.numel] holds what this rank's backward produced; it lives for good where gradients are
    replicated, and from the first gradient to the end of its reduction where they are sharded. ``home`` keeps
    this rank's shard [layout.shard_numel] of the average over the ranks. While gradients are replicated that
    is a slice of ``local``, unless a backward pass follows a reduction and both must be kept.
    """

    def __init__(
        self,
        unit: Unit,
        pool: BufferPool,
        landings: BufferPool,
        tiers: Tiers,
        accumulation_dtype: torch.dtype,
        accumulates: bool,
        exchange: GradientExchange,
        used_up: bool,
    ) -> None:
        self.unit = unit
        self._pool = pool
        self._tiers = tiers
        self._landing: torch.Tensor | None = None  # the pool memory that a reduction leaves its result in
        self._landing_dtype = accumulation_dtype
        self._accumulation_dtype = accumulation_dtype
        self._exchange = exchange
        self._buffer: torch.Tensor | None = None
        self._scratch: list[torch.Tensor] = []  # lent by the pool until the reduction ends
        self._waiting: list[tuple[int, torch.Tensor]] = []  # what came and is not in ``local`` yet
        self._filled: set[int] = set()  # parameters with a value in ``local`` that was not reduced yet
        self._arrived: set[int] = set()  # parameters that brought a gradient in this backward pass
        self._missing = 0  # a parameter that had not when somebody last asked
        self._packs_from = sys.maxsize if tiers.device.is_accelerator else _LARGE_BYTES
        self._sums = False  # whether passes add up before the next reduction, alike on all ranks
        self._gathering: Pending | None = None
        self._pending: Pending | None = None
        self.contributed: set[int] = set()  # parameters with a gradient since the gradients were cleared
        # Counts writes to the reduced gradient from outside. Those of a ShardedGradient move no version
        # counter, because torch does not count writes that happen below its dispatcher.
        self.changes = 0
        dtype = accumulation_dtype if accumulates else unit.layout.dtype
        self.local: torch.Tensor | None = None
        self._slice: SliceGradients | None = None
        self.home: GradientHome
        if unit.placement.grads:
            self.home = sharded_home(unit, dtype, accumulation_dtype, pool, landings, tiers, used_up)
        else:
            self.local = tiers.device.allocate("device", unit.layout.numel, dtype)
            begin, end = unit.layout.shard_range(unit.collectives.rank)
            self.home = self._slice = SliceGradients(
                self.local, begin, end, accumulation_dtype, pool, tiers.transfers
            )

    # -- collecting ---------------------------------------------------------------------------------------

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Adds the gradient of parameter ``index``, which nobody else changes any more. Those of a unit wait
        to be added all at once, in :meth:`pack`, as each call has its price. On a CPU it is small, and large
        ones do not wait, in memory of their own."""
        spec = self.unit.layout.specs[index]
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"parameter '{spec.name}' got a {gradient.layout} gradient; sharded gradients are dense. "
                "Build its module with sparse=False."
            )
        self._tiers.device.reduction_stream.release()
        self._waiting.append((index, gradient.detach() if gradient.requires_grad else gradient))
        self._arrived.add(index)
        self.contributed.add(index)
        if gradient.nbytes >= self._packs_from:
            self.pack()

    def pack(self) -> None:
        """Adds to ``local`` what came: at the latest before it is reduced, and at the end of backward."""
        if not self._waiting:
            return
        # After a gradient that was thought the last: ``local`` is still being read or gathered.
        if self.reducing and not self.unit.placement.optimizer and self.unit.collectives.in_one_order:
            return  # until that gather has ended, which begins in its turn, the same on all ranks
        waiting, self._waiting = self._waiting, []
        self.finish_reduction()
        self.finish_gather()
        if self.local is None:
            self.local = self._take_local()
        elif self._must_part():
            self._part()
        came = [gradient for _, gradient in waiting]
        while waiting:
            new: dict[int, torch.Tensor] = {}
            more: dict[int, torch.Tensor] = {}
            later = []  # checkpoints bring a gradient for each use of a parameter
            for index, gradient in waiting:
                if index in new or index in more:
                    later.append((index, gradient))
                else:
                    (more if index in self._filled else new)[index] = gradient
            self._write(new, adds=False)
            if more and self._sums and self.local.dtype != self._accumulation_dtype:
                self._widen_local()
            self._write(more, adds=True)
            self._filled.update(new)
            waiting = later
        self._tiers.device.reduction_stream.hold(came)

    def _write(self, gradients: Mapping[int, torch.Tensor], adds: bool) -> None:
        """Puts gradients of parameters to their places in ``local``, or ``adds`` them there."""
        layout, local = self.unit.layout, self.local
        if local is None:
            raise AssertionError("no memory for local gradients")
        dense, offsets = [], []
        for index, gradient in gradients.items():
            spec, offset = layout.specs[index], layout.offsets[index]
            if gradient.stride() != spec.stride and spec.numel:
                place = local.as_strided(spec.shape, spec.stride, offset)
                (place.add_ if adds else place.copy_)(gradient)
            else:
                in_order = gradient.is_contiguous()
                dense.append(gradient if in_order else gradient.as_strided((spec.numel,), (1,)))
                offsets.append(offset)
        if dense:
            (ops.accumulate_ if adds else ops.pack_)(local, dense, offsets)

    def begin_pass(self, keep_local: bool) -> None:
        """A backward pass begins: no gradient of it has arrived. ``keep_local`` says that they will stay
        unreduced."""
        self._arrived.clear()
        self._sums = self._sums or keep_local

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has brought its gradient in this backward pass."""
        arrived, parameters = self._arrived, self.unit.parameters
        if len(arrived) == len(parameters):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            # What was missing when somebody last asked mostly is.
            for index in (self._missing, *range(len(parameters))):
                if index not in arrived and parameters[index].requires_grad:
                    self._missing = index
                    return False
        return True

    @property
    def frozen(self) -> bool:
        """Whether nothing can come: no parameter is trainable now, and none brought a gradient before."""
        came = self._filled or self._waiting
        return not came and not any(parameter.requires_grad for parameter in self.unit.parameters)

    @property
    def reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._pending is not None

    @property
    def has_local(self) -> bool:
        """Whether there are gradients that were not reduced yet."""
        kept = self._aliased and self.unit.collectives.world_size == 1
        return bool(self._filled or self._waiting) and not kept

    # -- reducing -----------------------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Begins averaging ``local`` over the ranks; parameters without a gradient count as zero."""
        unit, layout = self.unit, self.unit.layout
        self.pack()
        if self.local is None:
            self.local = self._take_local()
        elif self._must_part():
            self._part()
        if self._sums and self.local.dtype != self._accumulation_dtype:
            self._widen_local()
        sums, self._sums = self._sums, False
        local = self.local_sum()
        if unit.collectives.world_size == 1:
            self._reduce_alone(local, sums)
            return
        self._filled.clear()
        target = self.home.begin(sums)
        accumulate = self.home.valid and target is not None
        if target is None:
            self._landing_dtype = self._accumulation_dtype if sums else self.home.dtype
            self._landing = self._lend(layout.shard_numel, self._landing_dtype, "landing")
            target = self._landing.view(self._landing_dtype)[: layout.shard_numel]
        self._pending = self._exchange.start(local, target, accumulate, self._borrow)

    def local_sum(self) -> torch.Tensor:
        """``local``, zero where nothing arrived that is not reduced yet, and in the padding."""
        self.pack()
        layout, local = self.unit.layout, self.local
        if local is None:
            raise AssertionError("no memory for local gradients")
        for index, spec in enumerate(layout.specs):
            if index not in self._filled:
                local[layout.offsets[index] : layout.offsets[index] + spec.numel].zero_()
        for begin, end in layout.gaps:
            local[begin:end].zero_()
        return local

    def _reduce_alone(self, local: torch.Tensor, sums: bool) -> None:
        """One rank's sum is the average already."""
        if self._aliased and local.dtype == self._accumulation_dtype:
            self.home.landed()  # and later gradients simply add to it
            return
        self._filled.clear()
        target = self.home.begin(sums)
        if self._buffer is not None:
            buffer, self._buffer, self.local = self._buffer, None, None
            self.home.take(buffer, local.dtype)
            return
        if target is None:
            raise AssertionError("replicated gradients in another tier")
        if not self._aliased:
            ops.sum_shards_(target, [local], 1.0, self.home.valid)
        self.home.landed()

    def finish_reduction(self) -> None:
        """Waits for :meth:`start_reduction`; gives scratch back and, if replicated, starts the gather."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        while self._scratch:
            self._pool.give(self._scratch.pop())
        if self._landing is None:
            self.home.landed()
        else:
            landing, self._landing = self._landing, None
            self.home.take(landing, self._landing_dtype)
        if self.unit.placement.grads:
            self._drop_local()
        elif not self.unit.placement.optimizer:
            self._start_gather()

    def finish_gather(self) -> None:
        """Waits until replicated gradients are whole on every rank."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self.local is not None and self._slice is not None and not self._aliased:
                self._slice.to_slice_of(self.local)
            self.pack()

    def finish(self) -> None:
        """After a reduction: waits for all that its result goes through. Raises ``RuntimeError`` if it could
        not be kept."""
        self.finish_gather()
        self.home.settle()
        if self.home.failure is not None:
            raise self.home.failure

    # -- reading ------------------------------------------------------------------------------------------

    def for_optimizer(self) -> ShardHome:
        """The reduced gradients of the elements this rank's optimizer owns: the shard, or all of them."""
        alone = self.unit.collectives.world_size == 1
        if alone or self.unit.placement.optimizer or self.local is None:
            return self.home.shard()
        return self._tiers.in_memory(self.local)

    def full_view(self, index: int) -> torch.Tensor | None:
        """The reduced gradient of parameter ``index`` in its shape if this rank holds all of it."""
        layout, spec = self.unit.layout, self.unit.layout.specs[index]
        whole = self.whole()
        if whole is None or whole.dtype != layout.dtype:
            return None
        return whole.as_strided(spec.shape, spec.stride, layout.offsets[index])

    def clear(self) -> None:
        """Forgets all gradients; memory of sharded ones stays for the next step."""
        self._waiting.clear()
        self._filled.clear()
        self._sums = False
        self.contributed.clear()
        self.home.forget()
        if self.unit.placement.grads:
            self._drop_local()

    def use_up(self) -> None:
        """An update has read the reduced gradient, which nobody needs any more."""
        self.home.forget()

    def zero_parameter(self, index: int) -> None:
        """Sets the gradient of one parameter to zero, where it is held here."""
        self.pack()
        layout = self.unit.layout
        self.change_parameter(index, lambda part: part.zero_())
        if self.local is not None and index in self._filled:
            self.local[layout.offsets[index] : layout.offsets[index] + layout.specs[index].numel].zero_()

    def assign(self, index: int, flat: torch.Tensor) -> None:
        """Makes ``flat``, whole and in memory order, the reduced gradient of one parameter, where it is held
        here; the parameter need not have had one."""
        self.pack()
        if self._filled:
            self.start_reduction()  # a single rank's local sum is the average
        elif not self.home.valid:
            self._begin_with_zeros()
        layout = self.unit.layout
        before = layout.shard_range(self.unit.collectives.rank)[0] - layout.offsets[index]
        start = max(before, 0) if self.whole() is None else 0
        self.change_parameter(index, Taken(flat[start:]))
        self.contributed.add(index)

    def _begin_with_zeros(self) -> None:
        """Makes the reduced gradient valid, as a later pass adds to all of it."""
        whole = self.whole()
        target = self.home.begin() if whole is None else whole
        if target is not None:
            target.zero_()
            self.home.landed()
            return
        landing = self._lend(self.unit.layout.shard_numel, self.home.dtype, "landing")
        landing.zero_()
        self.home.take(landing, self.home.dtype)
        self.home.settle()

    def change_parameter(self, index: int, change: Callable[[torch.Tensor], object]) -> None:
        """Applies ``change`` to what this rank holds of one parameter's reduced gradient: all of it if
        replicated."""
        layout, whole = self.unit.layout, self.whole()
        self.changes += 1
        if whole is not None:
            change(whole[layout.offsets[index] : layout.offsets[index] + layout.specs[index].numel])
            return
        for begin, end in self._own_ranges(index):
            self.home.change(begin, end, change)

    def _own_ranges(self, index: int) -> list[tuple[int, int]]:
        """Where one parameter's reduced gradient lies inside this rank's shard: once over all ranks."""
        begin, end = self.unit.layout.shard_range(self.unit.collectives.rank)
        return [
            (overlap.range_start, overlap.range_start + overlap.numel)
            for overlap in self.unit.layout.overlaps(begin, end)
            if overlap.index == index
        ]

    def add_squared_norm(self, squares: Squares, index: int | None = None) -> None:
        """Adds this rank's squares, of all parameters or of one."""
        if index is None:
            self.home.add_squares(squares)
            return
        for begin, end in self._own_ranges(index):
            for part in self.home.visit(begin, end):
                squares.add(part)

    def largest(self, index: int, device: torch.device) -> torch.Tensor:
        """Return the largest absolute value of one parameter's gradient held here, float64 [1] on ``device``;
        0 if there is none."""
        found = [torch.zeros((), dtype=torch.float64, device=device)]
        for begin, end in self._own_ranges(index):
            for part in self.home.visit(begin, end):
                if part.numel():
                    found.append(torch.linalg.vector_norm(part, float("inf")).to(device).double())
        return torch.stack(found).amax(0, keepdim=True)

    def clear_parameter(self, index: int) -> None:
        """Forgets the gradient of one parameter, here and in the reduced shard."""
        self.zero_parameter(index)
        self._filled.discard(index)
        self.contributed.discard(index)

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes kept from step to step, by tier: unreduced gradients and the reduced shard."""
        unreduced = self.local.nbytes if self.local is not None and self._buffer is None else 0
        held: dict[Tier, int] = {"device": unreduced}
        kept = 0 if self._aliased else self.home.held_bytes()
        return {**held, self.home.tier: held.get(self.home.tier, 0) + kept}

    def whole(self) -> torch.Tensor | None:
        """All of the reduced gradient [layout.numel], where this rank holds it in the device's memory."""
        if self.unit.collectives.world_size == 1:
            lent = isinstance(self.home, BorrowedGradients) and not self.home.valid
            far = self._tiers.device.of(self.home.tier) != self.unit.flat.device
            return None if lent or far else self.home.shard().memory(self.home.tier)
        return None if self.unit.placement.optimizer else self.local

    # -- memory -------------------------------------------------------------------------------------------

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        begin, end = self.unit.layout.shard_range(self.unit.collectives.rank)
        return full[begin:end]

    @property
    def _aliased(self) -> bool:
        """Whether the reduced gradient is a slice of ``local``."""
        return self._slice is not None and self.local is not None and self._slice.part_of(self.local)

    def _must_part(self) -> bool:
        """Whether a backward pass follows a reduction that was thought the last."""
        return not self._filled and self.home.valid and self._aliased

    def _part(self) -> None:
        """Keeps the reduced sum beside the new local one."""
        if self._slice is not None:
            self._slice.to_apart()

    def _borrow(self, numel: int, dtype: torch.dtype, purpose: Purpose) -> torch.Tensor:
        self._scratch.append(self._pool.take(numel * dtype.itemsize, self.unit.name, purpose))
        return self._scratch[-1].view(dtype)

    def _take_local(self) -> torch.Tensor:
        dtype = self._accumulation_dtype if self._sums else self.unit.layout.dtype
        # What stays unreduced is not staging: all units have it at once.
        with self._pool.growing() if self._sums else contextlib.nullcontext():
            self._buffer = self._lend(self.unit.layout.numel, dtype, "gradient")
        return self._buffer.view(dtype)[: self.unit.layout.numel]

    def _lend(self, numel: int, dtype: torch.dtype, purpose: Purpose) -> torch.Tensor:
        """A buffer that the home could take over."""
        nbytes, grain = numel * dtype.itemsize, self.home.alignment
        return self._pool.take(-(-nbytes // grain) * grain, self.unit.name, purpose)

    def _drop_local(self) -> None:
        if self._buffer is not None:
            self.local = None
            self._pool.give(self._buffer)
            self._buffer = None

    def _instead_of(self, old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory of its own for ``local``, for good."""
        self._tiers.device.reduction_stream.drop(old)
        return self._tiers.device.allocate("device", old.numel(), dtype)

    def _widen_local(self) -> None:
        narrow, buffer = self.local, self._buffer
        if narrow is None:
            raise AssertionError("no local gradients to widen")
        if buffer is None:
            aliased = self._aliased
            self.local = self._instead_of(narrow, self._accumulation_dtype).copy_(narrow)
            if aliased and self._slice is not None:
                self._slice.to_slice_of(self.local)
            return
        self.local = self._take_local().copy_(narrow)
        self._pool.give(buffer)

    def _start_gather(self) -> None:
        if self.local is None:
            raise AssertionError("replicated gradients without a buffer")
        if not self._aliased:
            if self.local.dtype != self.home.dtype:
                self.local = self._instead_of(self.local, self.home.dtype)
            self._own_slice(self.local).copy_(self.home.shard().read(0, self.unit.layout.shard_numel))
        self._gathering = self.unit.collectives.gather(
            self.local,
            self._own_slice(self.local),
            self.unit.wire_kind("gather_gradients"),
            f"gather of the gradients of {self.unit.describe()}",
        )


def make_gradients(
    unit: Unit,
    pool: BufferPool,
    landings: BufferPool,
    tiers: Tiers,
    config: ZeroConfig,
    collectives: Collectives,
    used_up: bool,
) -> UnitGradients:
    """The gradient buffers of ``unit`` in the precisions that ``config`` asks for, averaged over
    ``collectives``; ``used_up`` says that each is read once, by an update in backward."""
    return UnitGradients(
        unit,
        pool,
        landings,
        tiers,
        DTYPES[config.precision.grad_accum_dtype],
        config.batch.gradient_accumulation_steps > 1,
        gradient_exchange(unit, config, collectives.replicas),
        used_up,
    )
