"""Gradients of one unit: the full local sum of a backward pass, and the reduced shard the step reads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

import torch

from zero_ext import ops
from zero_ext.comm import Collectives, PendingCollective
from zero_ext.config import ZeroConfig
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import Tier, is_stored
from zero_ext.offload import ShardStorage, TierManager
from zero_ext.zero.construction.grouping import DTYPES
from zero_ext.zero.gradients.gradient_storage import (
    CopyInOrder,
    GradientGeneration,
    GradientStorage,
    Lifetime,
    MemoryGradientStorage,
    Squares,
)
from zero_ext.zero.gradients.nvme_gradient_storage import NvmeGradientStorage
from zero_ext.zero.gradients.reduce_scatter import gradient_reduce_scatter
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.memory.pool_plan import Purpose
from zero_ext.zero.units.unit import Unit

_LARGE_BYTES = 64 << 10  # of a gradient: as long to copy on a CPU as a call takes


class UnitGradients:
    """Collects, reduces and stores the gradients of ``unit``.

    ``local`` [layout.numel] holds the sums of this rank's backward passes. It is permanent where gradients
    are replicated. Where they are sharded, it exists from the first gradient to the end of its reduction.
    ``storage`` holds this rank's shard [layout.shard_numel] of the average over the ranks. With replicated
    gradients that is a slice of ``local``, unless a backward pass follows a reduction and both are needed.
    """

    def __init__(
        self,
        unit: Unit,
        pool: BufferPool,
        staging_buffers: BufferPool,
        tiers: TierManager,
        config: ZeroConfig,
        collectives: Collectives,
        used_up: bool,
        generation: GradientGeneration,
    ) -> None:
        """Allocate the buffers of ``unit`` in the precisions of ``config``. ``collectives`` are the ranks to
        average over. ``used_up``: each gradient is read once, by an update in backward."""
        accumulation_dtype = DTYPES[config.precision.grad_accum_dtype]
        self.unit, self._generation, self._pool, self._tiers = unit, generation, pool, tiers
        self._staging: torch.Tensor | None = None  # pool memory for the result of a reduction
        self._staging_dtype = accumulation_dtype
        self._accumulation_dtype = accumulation_dtype
        self._reduce_scatter = gradient_reduce_scatter(unit, config, collectives.replicas)
        self._buffer: torch.Tensor | None = None
        self._scratch: list[torch.Tensor] = []  # pool memory, until the reduction ends
        self._waiting: list[tuple[int, torch.Tensor]] = []  # gradients that are not in ``local`` yet
        self._filled: set[int] = set()  # parameters with a value in ``local`` that was not reduced yet
        self._arrived: set[int] = set()  # parameters with a gradient in this backward pass
        self._missing = 0  # a parameter without one at the last check
        self._packs_from = sys.maxsize if tiers.device.is_accelerator else _LARGE_BYTES
        self._sums = False  # whether passes add up before the next reduction, alike on all ranks
        self._gathering: PendingCollective | None = None
        self._pending: PendingCollective | None = None
        self.contributed: set[int] = set()  # parameters with a gradient since the gradients were cleared
        self.assigned: set[int] = set()  # those of them with a gradient that was assigned
        # Counts reductions and other writes to the reduced gradient. The version counter of its memory does
        # not show them all, because torch does not count writes that happen below its dispatcher.
        self.changes = 0
        accumulates = config.batch.gradient_accumulation_steps > 1
        dtype = accumulation_dtype if accumulates else unit.layout.dtype
        self.local: torch.Tensor | None = None
        self._slice: MemoryGradientStorage | None = None
        self.storage: GradientStorage
        self._allocate_storage(dtype, staging_buffers, used_up)

    def _allocate_storage(self, dtype: torch.dtype, staging_buffers: BufferPool, used_up: bool) -> None:
        unit, pool, tiers = self.unit, self._pool, self._tiers
        tier = unit.placement.grads_tier
        shared = (unit.layout.shard_numel, dtype, self._accumulation_dtype, pool)
        if is_stored(tier):
            self.storage = NvmeGradientStorage(*shared, tiers)
            return
        lifetime: Lifetime = "permanent" if unit.placement.grads else "alias"
        if unit.placement.grads and used_up and tier == "device":
            lifetime = "pooled"  # the device need not store what an update in backward uses
        self.storage = memory = MemoryGradientStorage(
            tier, *shared, staging_buffers, tiers.transfers, lifetime
        )
        if lifetime == "alias":
            self.local = tiers.device.allocate("device", unit.layout.numel, dtype)
            self._slice = memory
            self._alias_local()

    # -- collecting ---------------------------------------------------------------------------------------

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of parameter ``index``, which must not change any more. :meth:`pack` adds all
        gradients of a unit in one call, because each call costs time. On a CPU large gradients are added
        immediately, so that their memory is released."""
        spec = self.unit.layout.specs[index]
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"gradient of '{spec.name}': expected a dense one, got {gradient.layout}. Build its "
                "module with sparse=False."
            )
        self._generation.received += 1
        # Backward's stream waits here until earlier gradients are packed. They are held
        # until then, because torch's allocator would reuse their memory immediately.
        self._tiers.device.reduction_stream.release()
        self._waiting.append((index, gradient.detach() if gradient.requires_grad else gradient))
        self._arrived.add(index)
        self.contributed.add(index)
        if gradient.nbytes >= self._packs_from:
            self.pack()

    def pack(self) -> None:
        """Add waiting gradients to ``local``. Required before a reduction and at the end of backward."""
        if not self._waiting:
            return
        # A gradient after the unit's last expected one: ``local`` is still being read or gathered.
        if self.reducing and not self.unit.placement.optimizer and self.unit.collectives.in_one_order:
            return  # the gather begins at the same place on all ranks, and is followed by another pack
        # Emptied first, because ``finish_gather`` packs, too, and would add these gradients twice.
        waiting, self._waiting = self._waiting, []
        self.finish_reduction()
        self.finish_gather()
        self._prepare_local()
        added = [gradient for _, gradient in waiting]
        while waiting:
            new: dict[int, torch.Tensor] = {}
            more: dict[int, torch.Tensor] = {}
            later = []  # checkpointing yields one gradient per use of a parameter
            for index, gradient in waiting:
                if index in new or index in more:
                    later.append((index, gradient))
                else:
                    (more if index in self._filled else new)[index] = gradient
            self._write(new, adds=False)
            if more and self._sums:
                self._widen_local()
            self._write(more, adds=True)
            self._filled.update(new)
            waiting = later
        self._tiers.device.reduction_stream.hold(added)

    def _write(self, gradients: Mapping[int, torch.Tensor], adds: bool) -> None:
        """Copy gradients of parameters into ``local``, or add them where ``adds``."""
        layout, local = self.unit.layout, self._existing_local()
        dense, offsets = [], []
        for index, gradient in gradients.items():
            spec, offset = layout.specs[index], layout.offsets[index]
            if gradient.stride() != spec.stride and spec.numel:
                target = local.as_strided(spec.shape, spec.stride, offset)
                (target.add_ if adds else target.copy_)(gradient)
            else:
                # With the strides of the layout, elements in memory order are one contiguous range.
                in_order = gradient.is_contiguous()
                dense.append(gradient if in_order else gradient.as_strided((spec.numel,), (1,)))
                offsets.append(offset)
        if dense:
            (ops.accumulate_ if adds else ops.pack_)(local, dense, offsets)

    def begin_pass(self, unreduced: bool) -> None:
        """Begin a backward pass. ``unreduced``: its gradients will not be reduced."""
        self._arrived.clear()
        self._sums = self._sums or unreduced

    @property
    def complete(self) -> bool:
        """Return whether every trainable parameter has a gradient from this backward pass."""
        arrived, parameters = self._arrived, self.unit.parameters
        if len(arrived) == len(parameters):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            # The parameter that was missing at the last check mostly still is.
            for index in (self._missing, *range(len(parameters))):
                if index not in arrived and parameters[index].requires_grad:
                    self._missing = index
                    return False
        return True

    @property
    def frozen(self) -> bool:
        """Return whether no parameter is trainable or has an unreduced gradient."""
        added = self._filled or self._waiting
        return not added and not any(parameter.requires_grad for parameter in self.unit.parameters)

    @property
    def reducing(self) -> bool:
        """Return whether a reduction is in flight."""
        return self._pending is not None

    @property
    def has_local(self) -> bool:
        """Return whether there are unreduced gradients."""
        stored = self._aliased and self.unit.collectives.world_size == 1
        return bool(self._filled or self._waiting) and not stored

    # -- reducing -----------------------------------------------------------------------------------------

    def start_reduction(self) -> None:
        """Begin to average ``local`` over the ranks. Parameters without a gradient count as zero."""
        unit, layout = self.unit, self.unit.layout
        self.changes += 1
        self.pack()
        self._prepare_local()
        if self._sums:
            self._widen_local()
        sums, self._sums = self._sums, False
        local = self.local_sum()
        if unit.collectives.world_size == 1:
            self._reduce_alone(local, sums)
            return
        self._filled.clear()
        target = self.storage.begin_reduction(sums)
        accumulate = self.storage.valid and target is not None
        if target is None:
            self._staging_dtype = self._accumulation_dtype if sums else self.storage.dtype
            self._staging = self._lend(layout.shard_numel, self._staging_dtype, "staging")
            target = self._staging.view(self._staging_dtype)[: layout.shard_numel]
        self._pending = self._reduce_scatter.start(local, target, accumulate, self._borrow)

    def local_sum(self) -> torch.Tensor:
        """Return ``local``, with zeros in the padding and for parameters without an unreduced gradient."""
        self.pack()
        layout, local = self.unit.layout, self._existing_local()
        # Memory of the pool has old contents, and all of it is sent.
        for index in range(len(layout.specs)):
            if index not in self._filled:
                self._elements(local, index).zero_()
        for begin, end in layout.gaps:
            local[begin:end].zero_()
        return local

    def _reduce_alone(self, local: torch.Tensor, sums: bool) -> None:
        """Finish a reduction on a single rank, where the sum is the average."""
        if self._aliased and local.dtype == self._accumulation_dtype:
            self.storage.complete_reduction()  # and later gradients simply add to it
            return
        self._filled.clear()
        target = self.storage.begin_reduction(sums)
        if self._buffer is not None:
            buffer, self._buffer, self.local = self._buffer, None, None
            self.storage.adopt(buffer, local.dtype)
            return
        if target is None:
            raise zero_ext_bug("replicated gradients in another tier")
        if not self._aliased:
            ops.sum_shards_(target, [local], 1.0, self.storage.valid)
        self.storage.complete_reduction()

    def finish_reduction(self) -> None:
        """Wait for :meth:`start_reduction`. Release scratch memory and start the gather if replicated."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        while self._scratch:
            self._pool.release(self._scratch.pop())
        if self._staging is None:
            self.storage.complete_reduction()
        else:
            staging, self._staging = self._staging, None
            self.storage.adopt(staging, self._staging_dtype)
        if self.unit.placement.grads:
            self._drop_local()
        elif not self.unit.placement.optimizer:
            self._start_gather()

    def finish_gather(self) -> None:
        """Wait until replicated gradients are complete on every rank."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._alias_local()
            self.pack()

    def finish(self) -> None:
        """Wait for the gather and the transfers of a reduction. Raise ``RuntimeError`` if one failed."""
        self.finish_gather()
        self.storage.wait_transfers()
        if self.storage.failure is not None:
            raise self.storage.failure

    # -- reading ------------------------------------------------------------------------------------------

    def for_optimizer(self) -> ShardStorage:
        """Return the reduced gradients of the elements that this rank updates: the shard, or all of them."""
        alone = self.unit.collectives.world_size == 1
        if alone or self.unit.placement.optimizer or self.local is None:
            return self.storage.shard()
        return self._tiers.wrap_memory(self.local)

    def full_view(self, index: int) -> torch.Tensor | None:
        """Return the reduced gradient of parameter ``index`` in its shape if this rank holds all of it."""
        layout, full = self.unit.layout, self.full()
        if full is None or full.dtype != layout.dtype:
            return None
        spec = layout.specs[index]
        return full.as_strided(spec.shape, spec.stride, layout.offsets[index])

    def clear(self) -> None:
        """Forget all gradients. The memory of sharded ones stays for the next step."""
        self._waiting.clear()
        self._filled.clear()
        self._sums = False
        self.contributed.clear()
        self.assigned.clear()
        self.storage.forget()
        if self.unit.placement.grads:
            self._drop_local()

    def zero_parameter(self, index: int) -> None:
        """Set this rank's elements of one parameter's gradient to zero."""
        self.pack()
        self.change_parameter(index, lambda values: values.zero_())
        if self.local is not None and index in self._filled:
            self._elements(self.local, index).zero_()

    def assign(self, index: int, flat: torch.Tensor) -> None:
        """Make ``flat``, full and in memory order, the reduced gradient of one parameter, which need not have
        had one. Only this rank's elements are stored."""
        self.pack()
        if self._filled:
            self.start_reduction()  # a single rank's local sum is the average
        elif not self.storage.valid:
            self._begin_with_zeros()
        layout = self.unit.layout
        before = layout.shard_range(self.unit.collectives.rank)[0] - layout.offsets[index]
        start = max(before, 0) if self.full() is None else 0
        self.change_parameter(index, CopyInOrder(flat[start:]))
        self.contributed.add(index)
        self.assigned.add(index)

    def _begin_with_zeros(self) -> None:
        """Make the reduced gradient valid, because a later pass adds to all of it."""
        full = self.full()
        target = self.storage.begin_reduction() if full is None else full
        if target is not None:
            target.zero_()
            self.storage.complete_reduction()
            return
        staging = self._lend(self.unit.layout.shard_numel, self.storage.dtype, "staging")
        staging.zero_()
        self.storage.adopt(staging, self.storage.dtype)
        self.storage.wait_transfers()

    def change_parameter(self, index: int, change: Callable[[torch.Tensor], object]) -> None:
        """Apply ``change`` to this rank's elements of one parameter's reduced gradient, all if replicated."""
        full = self.full()
        self.changes += 1
        self._generation.writes += 1
        if full is not None:
            change(self._elements(full, index))
            return
        for begin, end in self._own_ranges(index):
            self.storage.change(begin, end, change)

    def _own_ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the ranges of one parameter in this rank's shard. Over all ranks they cover it once."""
        layout = self.unit.layout
        segments = layout.segments(*layout.shard_range(self.unit.collectives.rank))
        return [(each.begin, each.end) for each in segments if each.name == layout.specs[index].name]

    def add_squared_norm(self, squares: Squares, index: int | None = None) -> None:
        """Add the squares of this rank's elements of all parameters or of one."""
        if index is None:
            self.storage.add_squares(squares)
            return
        for values in self.visit_parameter(index):
            squares.add(values)

    def visit_parameter(self, index: int) -> Iterator[torch.Tensor]:
        """Yield this rank's elements of one parameter's reduced gradient in chunks."""
        for begin, end in self._own_ranges(index):
            yield from self.storage.visit(begin, end)

    def clear_parameter(self, index: int) -> None:
        """Forget the gradient of one parameter, in ``local`` and in the reduced shard."""
        self.zero_parameter(index)
        self._filled.discard(index)
        self.contributed.discard(index)
        self.assigned.discard(index)

    def allocated_bytes(self) -> dict[Tier, int]:
        """Return the bytes allocated between steps by tier: unreduced gradients and the reduced shard."""
        unreduced = self.local.nbytes if self.local is not None and self._buffer is None else 0
        held: dict[Tier, int] = {"device": unreduced}
        return {**held, self.storage.tier: held.get(self.storage.tier, 0) + self.storage.allocated_bytes()}

    def full(self) -> torch.Tensor | None:
        """Return the full reduced gradient [layout.numel] if it is in this rank's device memory."""
        if self.unit.collectives.world_size == 1:
            return self.storage.device_memory()
        return None if self.unit.placement.optimizer else self.local

    # -- memory -------------------------------------------------------------------------------------------

    def _existing_local(self) -> torch.Tensor:
        if self.local is None:
            raise zero_ext_bug("no memory for local gradients")
        return self.local

    def _elements(self, full: torch.Tensor, index: int) -> torch.Tensor:
        begin = self.unit.layout.offsets[index]
        return full[begin : begin + self.unit.layout.specs[index].numel]

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        begin, end = self.unit.layout.shard_range(self.unit.collectives.rank)
        return full[begin:end]

    @property
    def _aliased(self) -> bool:
        """Return whether the reduced gradient is a slice of ``local``."""
        return self._slice is not None and self._slice.lifetime == "alias"

    def _alias_local(self) -> None:
        if self._slice is not None:
            self._slice.alias(self._own_slice(self._existing_local()))

    def _prepare_local(self) -> None:
        """Acquire ``local``. If a pass follows the last expected reduction, keep the reduced sum apart."""
        if self.local is None:
            self.local = self._acquire_local()
        elif self._slice is not None and self._aliased and self.storage.valid and not self._filled:
            self._slice.reallocate()

    def _borrow(self, numel: int, dtype: torch.dtype, purpose: Purpose) -> torch.Tensor:
        self._scratch.append(self._pool.acquire(numel * dtype.itemsize, self.unit.name, purpose))
        return self._scratch[-1].view(dtype)

    def _acquire_local(self) -> torch.Tensor:
        dtype = self._accumulation_dtype if self._sums else self.unit.layout.dtype
        # Unreduced gradients are not transient: all units have them simultaneously.
        with self._pool.growing() if self._sums else contextlib.nullcontext():
            self._buffer = self._lend(self.unit.layout.numel, dtype, "gradient")
        return self._buffer.view(dtype)[: self.unit.layout.numel]

    def _lend(self, numel: int, dtype: torch.dtype, purpose: Purpose) -> torch.Tensor:
        """Acquire a buffer that the storage may adopt."""
        nbytes, grain = numel * dtype.itemsize, self.storage.alignment
        return self._pool.acquire(-(-nbytes // grain) * grain, self.unit.name, purpose)

    def _drop_local(self) -> None:
        if self._buffer is not None:
            self.local = None
            self._pool.release(self._buffer)
            self._buffer = None

    def _instead_of(self, old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocate permanent memory for ``local``."""
        self._tiers.device.reduction_stream.drop(old)
        return self._tiers.device.allocate("device", old.numel(), dtype)

    def _widen_local(self) -> None:
        narrow, buffer = self._existing_local(), self._buffer
        if narrow.dtype == self._accumulation_dtype:
            return
        if buffer is None:
            aliased = self._aliased
            self.local = self._instead_of(narrow, self._accumulation_dtype).copy_(narrow)
            if aliased:
                self._alias_local()
            return
        self.local = self._acquire_local().copy_(narrow)
        self._pool.release(buffer)

    def _start_gather(self) -> None:
        local = self._existing_local()
        if not self._aliased:
            if local.dtype != self.storage.dtype:
                self.local = local = self._instead_of(local, self.storage.dtype)
            self._own_slice(local).copy_(self.storage.shard().read(0, self.unit.layout.shard_numel))
        self._gathering = self.unit.collectives.gather(
            local,
            self._own_slice(local),
            self.unit.traffic_kind("gather_gradients"),
            f"gather of the gradients of {self.unit.describe()}",
        )
