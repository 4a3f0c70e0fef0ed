"""A unit: parameters that share one flat buffer and are gathered, reduced and released as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zero_ext.comm import Collectives, PendingCollective
from zero_ext.config.communication import CommunicationConfig
from zero_ext.config.events import persistent_kind
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import COMPLETED, CopyHandle, TierManager, put
from zero_ext.zero.memory.gathered_unit import ExpertSelection, UnitSpec, UnitState
from zero_ext.zero.memory.lifetime import Ending
from zero_ext.zero.memory.pool import BufferPool, attach, detach
from zero_ext.zero.units.dtensor_local import is_distributed, local_tensor, point_at, set_data
from zero_ext.zero.units.expert_ranges import ExpertRanges, Ranges, fetch_ranges
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.param_gather import ParameterGather
from zero_ext.zero.units.placeholder import blanks
from zero_ext.zero.units.released_params import gathered_class, plain_class, released_class


class Unit(Ending):
    """Flat parameters of one dtype, their shard, and the transitions between gathered and released.

    ``flat`` [layout.numel] has the same storage object throughout: empty while released, a pool buffer while
    gathered. ``storage`` is this rank's shard [layout.shard_numel], in some tier. Where parameters are
    replicated it is a slice of ``flat``. ``holders`` are the running calls that need the unit; it may be
    released when there is none.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        pool: BufferPool,
        tiers: TierManager,
        communication: CommunicationConfig,
    ) -> None:
        self.spec, self.name, self.placement = spec, spec.name, spec.placement
        self.parameters = tuple(parameters)
        self.layout = layout
        names = [spec.name for spec in layout.specs]
        listed = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        self._described = f"unit '{spec.name}' ({len(names)} parameters: {listed})"
        self.collectives = collectives
        self.holders: set[object] = set()
        self._pool = pool
        self._buffer: torch.Tensor | None = None
        self._copy: CopyHandle = COMPLETED
        self._pending: PendingCollective | None = None
        self.exact = True  # whether the gathered values are the shards themselves, not quantized ones
        self._experts = ExpertRanges(layout, spec.experts, spec.stacked) if spec.experts else None
        self._selected: ExpertSelection = None  # experts with values in the gathered flat buffer
        communication = communication if spec.placement.params else CommunicationConfig()
        self.param_gather = ParameterGather(spec.name, layout, collectives, pool, tiers, communication)
        with torch.inference_mode(False), torch.no_grad():
            self._make_buffers(tiers)
            self._views = [
                self.flat.as_strided(spec.shape, spec.stride, offset)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            ]
            elements = blanks(len(layout.specs), layout.dtype, tiers.device.device)
            self._placeholders = [
                elements[index].expand(spec.shape) for index, spec in enumerate(layout.specs)
            ]
        # Addresses of released parameters, and offsets in ``flat`` of gathered ones. Parameters without
        # elements have none.
        self._blank_addresses = [each.data_ptr() for each in self._placeholders]
        self._starts = [
            offset * layout.dtype.itemsize if spec.numel else None
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ]
        self._classes: tuple[tuple[type, type], ...] = ()  # gathered and released class of each parameter
        self._distributed = any(map(is_distributed, self.parameters))
        with torch._C.DisableTorchFunctionSubclass():
            # Not those of an engine before this one, with which its graphs have saved the parameters.
            self._set_generations([parameter._version + 1 for parameter in self.parameters])
        self._expected = self._generations
        self.state = UnitState.GATHERED

    def _make_buffers(self, tiers: TierManager) -> None:
        layout = self.layout
        if self.placement.params:
            empty = torch.empty(0, dtype=layout.dtype, device=tiers.device.device)
            memory = self._pool.blank(layout.nbytes).untyped_storage()
            self._buffer = self._pool.acquire(layout.nbytes, self.name, "parameters")
            attach(memory, self._buffer)
            self.flat = empty.set_(memory, 0, (layout.numel,), (1,))
            self.storage = tiers.allocate_shard(self.placement.params_tier, layout.shard_numel, layout.dtype)
        else:
            self.flat = tiers.device.allocate("device", layout.numel, layout.dtype)
        begin, end = layout.shard_range(self.collectives.rank)
        self._own = self.flat[begin:end]
        if not self.placement.params:
            self.storage = tiers.wrap_memory(self._own)

    @property
    def needs_early_gather(self) -> bool:
        """Return whether a gather or a copy to an accelerator follows the fetch, to be started before use."""
        return self.layout.world_size > 1 or self.flat.device.type != "cpu"

    # -- life cycle ---------------------------------------------------------------------------------------

    def to_fetching(self, exact: bool = False, experts: ExpertSelection = None) -> None:
        """Attach a buffer and start to fetch the shard into it, if the gather needs it. From RELEASED only.
        ``exact``: the shards themselves will be gathered. ``experts``: of the experts, only these."""
        self._require(UnitState.RELEASED)
        misuse = self._misuse()
        if misuse is not None:
            raise misuse
        self._buffer = self._pool.acquire(self.layout.nbytes, self.name, "parameters")
        attach(self.flat.untyped_storage(), self._buffer)
        self.state = UnitState.FETCHING
        self.exact = exact or not self.param_gather.is_lossy
        ranges = self._select(experts)
        if self.param_gather.needs_shard or exact:
            try:
                self._copy = self._fetch(ranges)
            except RuntimeError as error:
                self._drop_buffer()
                raise self._abort(error) from error

    def to_gathering(self) -> None:
        """Start the all-gather as soon as the shard is fetched. From FETCHING only. Returns to RELEASED, to
        be tried again, if the shard could not be read."""
        self._require(UnitState.FETCHING)
        with contextlib.ExitStack() as following:
            try:
                if self.exact:
                    # The gather follows the copy in the copy's stream, so that computation need not
                    # wait for it.
                    following.enter_context(self._copy.stream_context())
                else:
                    self._copy.wait()  # payloads are quantized in the current stream
            except RuntimeError as error:
                self._drop_buffer()
                raise self._abort(error) from error
            self._pending = self._start_gather(self._selected_ranges())
        self.state = UnitState.GATHERING

    def to_gathered(self) -> None:
        """Wait for the gather, if one is running, and make the parameters views. From GATHERING only."""
        self._require(UnitState.GATHERING)
        self._await_exchange()
        # A write since the fetch began went to a placeholder, and the views would hide its loss.
        misuse = self._misuse()
        if misuse is not None:
            self._drop_buffer()
            raise misuse
        self._point_at(self._views)
        self.state = UnitState.GATHERED

    def _select(self, experts: ExpertSelection) -> Ranges | None:
        """Note that only ``experts`` are gathered. Return their ranges of the flat buffer, None for all."""
        if self._experts is not None and experts is not None:
            self._selected = experts
            self._experts.blank_others(self.flat, experts)
        return self._selected_ranges()

    def _selected_ranges(self) -> Ranges | None:
        if self._experts is None or self._selected is None:
            return None
        return self._experts.of(self._selected, shared=True)

    def _fetch(self, ranges: Ranges | None) -> CopyHandle:
        if ranges is None:
            return self.storage.fetch(self._own)
        first, _ = self.layout.shard_range(self.collectives.rank)
        return fetch_ranges(self.storage, self._own, first, ranges)

    def _start_gather(self, ranges: Ranges | None) -> PendingCollective:
        kind, label = self.traffic_kind("gather"), f"gather of {self._described}"
        return self.param_gather.start(self.flat, self._own, kind, label, self.exact, ranges)

    @property
    def is_partial(self) -> bool:
        """Return whether only some of its experts are gathered."""
        return self._selected is not None

    def cover(self, experts: ExpertSelection) -> None:
        """Gather those of ``experts`` that are missing, None for all of them. From GATHERED only."""
        self._require(UnitState.GATHERED)
        if self._experts is None or self._selected is None:
            return
        missing = (self._experts.everyone if experts is None else experts) - self._selected
        if missing:
            ranges = self._experts.of(missing, shared=False)
            with contextlib.ExitStack() as following:
                try:
                    copy = self._fetch(ranges)
                    following.enter_context(copy.stream_context())
                except RuntimeError as error:
                    raise self._abort(error) from error
                pending = self._start_gather(ranges)
            pending.wait()
            copy.wait()
        present = self._selected | missing
        self._selected = None if present == self._experts.everyone else present

    def set_aside(self) -> None:
        """Store the full values for :meth:`to_gathered`, while every parameter is a placeholder. From
        GATHERED only, with nothing written."""
        self._require(UnitState.GATHERED)
        self._point_at(self._placeholders)
        self.state = UnitState.GATHERING

    @property
    def is_aside(self) -> bool:
        """Return whether :meth:`set_aside` stores the values."""
        return self.state is UnitState.GATHERING and self._pending is None

    def to_released(self) -> None:
        """Drop the full parameters, after waiting for a running copy or gather. From any other state, without
        holders, where parameters are sharded."""
        self._require(UnitState.FETCHING, UnitState.GATHERING, UnitState.GATHERED)
        if not self.placement.params or self.holders:
            raise zero_ext_bug(f"{self.describe()}: released while replicated or still held")
        # The error is raised after the buffer was returned, so that the pool does not lose it.
        problem = self._misuse()
        if self.state is UnitState.FETCHING:
            try:
                # The copy still writes to the buffer, which the pool is about to give to another unit.
                self._copy.wait()
            except RuntimeError as error:
                problem = problem or self._abort(error)
        elif self.state is UnitState.GATHERING:
            # If this raises the buffer stays: a peer's shard may still come into it.
            self._await_exchange()
        self._drop_buffer()
        if problem is not None:
            raise problem

    def _await_exchange(self) -> None:
        if self._pending is None:
            return  # set aside: it is complete
        self._pending.wait()
        self._pending = None
        # A single rank has no collective that follows the copy, so nothing else waits for it.
        self._copy.wait()
        self.param_gather.finish(self.flat)

    def _drop_buffer(self) -> None:
        if self._buffer is None:
            raise zero_ext_bug(f"{self.describe()}: no buffer to drop")
        self._point_at(self._placeholders)
        detach(self.flat.untyped_storage(), self._buffer)
        self._pool.release(self._buffer)
        self._buffer, self._copy, self._selected = None, COMPLETED, None
        self.state = UnitState.RELEASED

    def _abort(self, error: RuntimeError) -> RuntimeError:
        """Abort the gather on the other ranks after an error of this rank, and return the error to raise."""
        reason = f"rank {self.collectives.rank}: the shard of {self.describe()} could not be read: {error}"
        self.collectives.abort(reason)
        alone = self.collectives.world_size == 1
        advice = (
            "Nothing was changed. Check the storage."
            if alone
            else "Start all ranks again from the last checkpoint."
        )
        return RuntimeError(f"{reason}. {advice}")

    def invalidate(self) -> None:
        """Drop what nodes keep of others' shards, before shards change."""
        self.param_gather.invalidate()

    def start_publishing(self) -> PendingCollective | None:
        """Start to gather the updated shards after a step, where parameters are replicated but updated in
        shards. Return what to wait for, or None if there is nothing to do."""
        single = self.collectives.world_size == 1
        if single or self.placement.params or not self.placement.optimizer:
            return None
        return self.collectives.gather(
            self.flat,
            self._own,
            self.traffic_kind("gather_updated"),
            f"gather of the updated {self.describe()}",
        )

    # -- contents -----------------------------------------------------------------------------------------

    def put(self, index: int, start: int, values: torch.Tensor) -> None:
        """Write elements of a parameter, in memory order from ``start`` on, into the gathered flat buffer."""
        self._require(UnitState.GATHERED)
        begin = self.layout.offsets[index] + start
        self.flat[begin : begin + values.numel()].copy_(values)

    def publish(self) -> None:
        """Make what was put into the gathered flat buffer the parameters and the shard."""
        self._require(UnitState.GATHERED)
        for begin, end in self.layout.gaps:
            self.flat[begin:end].zero_()
        self.store_shard()
        self.publish_views()

    def publish_views(self) -> None:
        """Make the parameters views of the gathered flat buffer as it is."""
        self._require(UnitState.GATHERED)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.__class__ = plain_class(parameter)
            if not torch._has_compatible_shallow_copy_type(local_tensor(parameter), view):
                _move(parameter, view.device)
        self._point_at(self._views)

    def store_shard(self) -> None:
        """Copy this rank's slice of the gathered flat buffer to the shard, unless they share memory.
        ``RuntimeError``: the buffer was gathered in quantized form, so the shard would lose its precision. It
        is raised on all ranks."""
        if not self.exact:
            raise RuntimeError(
                f"{self.describe()}: it is in use and was gathered with communication.quantized_weights, so "
                "it does not have the exact values of its shards. Write to it outside forward and backward."
            )
        self.invalidate()
        put(self.storage, 0, self._own, "device")

    def view_of(self, index: int) -> torch.Tensor:
        """Return the gathered full value of parameter ``index``; valid until the unit is released."""
        self._require(UnitState.GATHERED)
        return self._views[index]

    # -- writes -------------------------------------------------------------------------------------------
    # Autograd compares a tensor's version counter with the one at which it saved the tensor. The counters of
    # sharded parameters therefore differ while they are released: a backward that would use a released
    # parameter, or a view of it, raises.

    def generation(self, index: int) -> int:
        """Return a number that changes whenever the value of parameter ``index`` does."""
        return self._generations[index]

    def accept_writes(self) -> None:
        """Declare what was written to the parameters so far as intended."""
        released = self._expected is self._released_generations
        if not released:
            self._set_generations(parameter._version for parameter in self.parameters)
        self._mark(released)

    def forbid_saved(self, indices: Iterable[int]) -> None:
        """Make autograd raise if it still needs the values that it saved of these updated parameters."""
        # ``_mark`` would hide a write that nobody has accepted yet.
        if not self.written():
            released = self._expected is self._released_generations
            changed = frozenset(indices)
            # A generation is the counter while gathered, and the number after it the counter while
            # released. The step is 2 so that neither comes up again.
            self._set_generations(
                version + 2 * (index in changed) for index, version in enumerate(self._generations)
            )
            self._mark(released)

    def written(self) -> list[int]:
        """Return the indices of parameters that were written in place since the last check."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = [parameter._version for parameter in self.parameters]
        if versions == self._expected:
            return []
        return [
            index
            for index, (version, wanted) in enumerate(zip(versions, self._expected, strict=True))
            if version != wanted
        ]

    def _set_generations(self, generations: Iterable[int]) -> None:
        self._generations = list(generations)
        self._released_generations = [version + 1 for version in self._generations]

    def _mark(self, released: bool) -> None:
        """Set the version counters of this state."""
        self._expected = self._released_generations if released else self._generations
        torch._C._autograd._unsafe_set_version_counter(self.parameters, tuple(self._expected))

    def describe(self) -> str:
        """Return name and parameters, for errors."""
        return self._described

    def traffic_kind(self, kind: str) -> str:
        """Return the name under which the traffic of a collective of this unit is counted."""
        return persistent_kind(kind) if self.spec.persistent else kind

    def _point_at(self, tensors: Sequence[torch.Tensor]) -> None:
        released = tensors is self._placeholders
        if not self._classes:
            kinds = [plain_class(parameter) for parameter in self.parameters]
            self._classes = tuple((gathered_class(kind), released_class(kind)) for kind in kinds)
        for parameter, tensor, classes in zip(self.parameters, tensors, self._classes, strict=True):
            # The class changes first because setting data on a released class calls its
            # ``__torch_function__``.
            parameter.__class__ = classes[0]
            if self._distributed:
                point_at(parameter, tensor)
            else:
                set_data(parameter, tensor)
            if released:
                parameter.__class__ = classes[1]
        self._mark(released)

    def check_unmoved(self) -> None:
        """Raise if a parameter's data was replaced: ``.half()``, ``p.data = ...``."""
        moved = self._moved()
        if moved is not None:
            raise moved

    def _moved(self) -> RuntimeError | None:
        dtype, addresses = self.layout.dtype, self._blank_addresses
        if self.state is UnitState.GATHERED:
            begin = self.flat.data_ptr()
            addresses = [0 if start is None else begin + start for start in self._starts]
        with torch._C.DisableTorchFunctionSubclass():
            tensors = list(map(local_tensor, self.parameters)) if self._distributed else self.parameters
            for number, (local, address) in enumerate(zip(tensors, addresses, strict=True)):
                if local.data_ptr() != address or local.dtype is not dtype:
                    return RuntimeError(
                        f"rank {self.collectives.rank}: the data of parameter "
                        f"'{self.layout.specs[number].name}' was replaced after zero_ext.prepare (by .half() "
                        "or .to()). Convert the model before prepare, and edit values in place inside 'with "
                        "zero_ext.gathered(params):'."
                    )
        return None

    def _misuse(self) -> RuntimeError | None:
        """Return the error for changes of the parameters that the engine did not make, if any."""
        moved = self._moved()
        if moved is not None:
            return moved
        if self.state is UnitState.GATHERED:
            return None  # writes to what is in memory are for whoever releases it
        written = self.written()
        if not written:
            return None
        return RuntimeError(
            f"rank {self.collectives.rank}: parameter '{self.layout.specs[written[0]].name}' was written to "
            "through a view from the time it was in memory, and the value would be lost. Write "
            "to the parameter itself, or inside 'with zero_ext.gathered(params, modifier_rank=0):'."
        )

    def _require(self, *states: UnitState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise zero_ext_bug(
                f"rank {self.collectives.rank}: {self.describe()} is {self.state.value}, not {wanted}"
            )


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move ``parameter``, the same object, to a device to which its ``data`` cannot be set."""
    # Empty: a view would share its version counter, and gathers would look like writes to the parameter.
    empty = torch.empty(0, dtype=parameter.dtype, device=device)
    moved = torch.Tensor._make_subclass(type(parameter), empty, parameter.requires_grad)
    vars(moved).update(vars(parameter))
    torch.utils.swap_tensors(parameter, moved)
