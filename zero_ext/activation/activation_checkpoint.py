"""``checkpoint``: a call whose activations are computed again in backward, and where its inputs wait."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_ext.activation.activation_storage import MemoryRoom, Room, StoreRoom
from zero_ext.activation.checkpoint_call import (
    Call,
    check_outputs,
    check_unchanged,
    code_of,
    is_parameter,
    modules_of,
    name_of,
    versions,
)
from zero_ext.activation.offload_saved_tensors import AsItIs, SavedTensors, Stays
from zero_ext.activation.offloader import Keeper, Record
from zero_ext.activation.packed_layout import fits
from zero_ext.activation.partitioned_activations import Partition, check_group
from zero_ext.activation.random_streams import RandomStreams
from zero_ext.activation.recompute_context import Context, NamedErrors, Recomputation, together
from zero_ext.activation.selective_budget import MeasuringMode, choose
from zero_ext.activation.selective_policy import Contexts, Step, keeping_ops, keeping_steps, named_ops
from zero_ext.activation.transfer_counters import Counters
from zero_ext.config import ActivationPolicy, AioPolicy, Tier
from zero_ext.config.events import Bus
from zero_ext.offload import Device
from zero_ext.offload.tier_manager import open_store

# Calls of different modules, modes and sizes whose plans are known at once; the oldest one is made again.
_MOST_PLANS = 1024
# Tensors that calls were given last. Those that are gone count too: ranks that share inputs forget the same.
_MOST_GIVEN = 1024
# Those entered in a thread, the innermost one last.
_current: ContextVar[tuple[Checkpointing, ...]] = ContextVar("zero_ext_checkpointing", default=())


class Checkpointing:
    """Keeps calls for backward as ``policy`` says; call it as ``checkpointing(function, *args, **kwargs)``.

    Threads may use it at once; those of several threads that inputs are partitioned in would have to come in
    one order on all ranks.

    As a context manager it is what :func:`checkpoint` uses inside, in this thread, and at its end nothing
    that was moved is left on the device; ``zero_ext.prepare`` has the model's forward run in one.

    Args:
        policy: see :class:`zero_ext.config.ActivationPolicy`.
        group: ranks that hold identical inputs, for ``policy.partition_activations``.
        data_parallel_group: ranks that do not; ``group`` may share no two ranks with it.
        aio: how files on NVMe are read and written.
        stays: tells of a tensor that it must not be moved; parameters and their views never are.
        streams: random number streams that functions continue, restored for recomputation.
        counters: who counts what is moved; ones of its own unless given.
        timeout_seconds: longest wait for another rank of ``group``.

    Raises:
        ValueError: the group cannot share activations, or ``policy.keep`` names an op that there is not or
            a collective.
    """

    def __init__(
        self,
        policy: ActivationPolicy = ActivationPolicy(),  # noqa: B008 - frozen
        group: dist.ProcessGroup | None = None,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        aio: AioPolicy = AioPolicy(),  # noqa: B008 - frozen
        stays: Stays = lambda tensor: False,
        streams: RandomStreams | None = None,
        counters: Counters | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if group is not None:
            check_group(group, data_parallel_group)
        self.policy = policy
        self.counters = Counters() if counters is None else counters
        self.streams = RandomStreams() if streams is None else streams
        self._group = group
        self._data_parallel_group = data_parallel_group
        self._aio = aio
        self._stays = stays
        self._timeout_seconds = timeout_seconds
        self._ops = named_ops(policy.keep)
        self._lock = threading.RLock()  # of what is made and noted below
        self._plans: dict[object, frozenset[Step]] = {}
        self._keepers: dict[torch.device, Keeper] = {}
        # Tensors that calls were given, the last one last, with their versions: what is given again stays.
        # The weak reference keeps the storage object's address from being used again.
        self._given: dict[object, tuple[StorageWeakRef, int]] = {}

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``; see :func:`checkpoint`."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _compiled(function, args, kwargs)
        if self.policy.mode == "saved_tensors":
            with self.saved_tensors(*modules_of(function)):
                return function(*args, **kwargs)
        call = Call(function, args, kwargs)
        self._synchronize()
        given = call.take_tensors()
        before = versions(given)
        with self._keeping(call.name, given):
            outputs = torch_checkpoint(
                call.run,
                *given,
                use_reentrant=False,
                context_fn=lambda: self._contexts(call, given, function),
            )
        check_unchanged(call.name, given, before)
        check_outputs(call.name, outputs)
        self._synchronize()
        return outputs

    def saved_tensors(self, *modules: nn.Module) -> Context:
        """Inside, what autograd saves is kept in the policy's tier, and nothing is computed again.

        Parameters and their views stay where they are: those of the model given to ``prepare``, gathered or
        not, those of ``modules``, whatever sees their memory, and any other ones.

        Raises ``ValueError`` if that tier is the device. Tensors are moved to host memory or storage as they
        are saved.
        """
        if self.policy.kept_in == "device":
            raise ValueError(
                "saved tensors are on the device already: activation_checkpointing.tier is 'device'; set it "
                "to 'host' or 'nvme'"
            )
        with torch._C.DisableTorchFunctionSubclass():  # those that ZeRO has released have no memory to name
            own = {each.untyped_storage()._cdata for module in modules for each in module.parameters()}

        def stays(tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage()._cdata
            return is_parameter(tensor) or storage in own or self._stays(tensor)

        return SavedTensors(self._keeper, self.policy.smallest_bytes, stays)

    @property
    def bus(self) -> Bus:
        """Who hears of the work, with ``policy.profile``."""
        return self.counters.bus

    def kept_bytes(self) -> int:
        """Bytes that this rank keeps now of inputs, or saved tensors, in the policy's tier."""
        return sum(keeper.kept_bytes() for keeper in tuple(self._keepers.values()))

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of memory and storage taken for that, in use or not, by tier."""
        held: dict[Tier, int] = {"device": 0, "host": 0, "nvme": 0}
        for keeper in tuple(self._keepers.values()):
            for tier, nbytes in keeper.held_bytes().items():
                held[tier] += nbytes
        return held

    def __enter__(self) -> Checkpointing:
        _current.set((*_current.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.set(_current.get()[:-1])
        for keeper in tuple(self._keepers.values()):  # other threads may add theirs
            keeper.let_go()

    @contextlib.contextmanager
    def _keeping(self, name: str, given: list[torch.Tensor]) -> Iterator[None]:
        """Inside, torch saves the tensors of a call in the policy's room, where it has one.

        Inside another checkpointed call, or other hooks of saved tensors, these decide.
        """
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        device = _device_of(given)
        moved = [] if hooked or not self.policy.moves else self._to_move(given, device)
        if self.policy.partition_activations and given and not hooked:
            # With nothing to move too: the other ranks, which may have something, would wait.
            self._keeper(device).compare(moved, name)
        if not moved:
            yield
            return
        keeper = self._keeper(device)
        record = keeper.keep(moved, name)
        places = {_identity(tensor): index for index, tensor in enumerate(moved)}

        def pack(tensor: torch.Tensor) -> tuple[Record, int] | AsItIs:
            index = places.get(_identity(tensor))
            if index is None:
                return AsItIs.of(tensor)
            record.add_receiver(index)
            return record, index

        def unpack(packed: tuple[Record, int] | AsItIs) -> torch.Tensor:
            return packed.get() if isinstance(packed, AsItIs) else keeper.fetch(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _to_move(self, given: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The tensors of a call on ``device`` that move, each memory once."""
        found: dict[object, torch.Tensor] = {}
        for tensor in given:
            if tensor.device != device or not fits(tensor) or is_parameter(tensor) or tensor.is_inference():
                continue
            if tensor.nbytes >= self.policy.smallest_bytes and not self._stays(tensor):
                found.setdefault(_identity(tensor), tensor)
        with self._lock:
            return [tensor for tensor in found.values() if not self._was_given(tensor)]

    def _was_given(self, tensor: torch.Tensor) -> bool:
        """Whether another call had the same tensor, unchanged since. Another view of its memory is another
        tensor: each piece of one may be given to one call only."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, _identity(tensor))
        _, version = self._given.pop(key, (None, None))
        self._given[key] = StorageWeakRef(storage), tensor._version
        if len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]
        return version == tensor._version

    def _contexts(self, call: Call, given: list[torch.Tensor], function: Callable[..., Any]) -> Contexts:
        modes = self._modes(call.name, given, function)
        again = Recomputation(
            call.name,
            self.streams,
            call.generators,
            lambda: together(self, modes[1]),
            self.bus if self.policy.profile else None,
            self._synchronize,
        )
        return together(NamedErrors(call.name), modes[0]), again

    def _modes(self, name: str, given: list[torch.Tensor], function: Callable[..., Any]) -> Contexts:
        """What keeps some of a call's results: while it runs, and while it runs again."""
        if self._ops:
            return keeping_ops(self._ops)
        budget = self.policy.keep_bytes
        if budget is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        # Not all that decides what a call computes: what varies from call to call would never have a plan.
        code, modules = code_of(function)
        key = (
            name,
            code,
            *((weakref.ref(module), module.training) for module in modules),
            *((tensor.shape, tensor.dtype, tensor.device) for tensor in given),
            *map(_autocast, sorted({"cpu", *(tensor.device.type for tensor in given)})),
        )
        plan = self._plans.get(key)
        if plan is not None:
            return keeping_steps(plan, budget)
        return self._measured(key, budget, given), contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self, key: object, budget: int, given: list[torch.Tensor]) -> Iterator[None]:
        device = given[0].device if given else torch.device("cpu")
        with MeasuringMode(device) as mode:
            yield
        with self._lock:
            self._plans[key] = choose(mode.steps, budget)
            if len(self._plans) > _MOST_PLANS:
                del self._plans[next(iter(self._plans))]

    def _keeper(self, device: torch.device) -> Keeper:
        with self._lock:
            if device not in self._keepers:
                self._keepers[device] = self._new_keeper(device)
            return self._keepers[device]

    def _new_keeper(self, device: torch.device) -> Keeper:
        partition = None
        if self.policy.partition_activations:
            check_group(self._group, self._data_parallel_group)
            if self._group is not None:
                partition = Partition(self._group, device, self._timeout_seconds, self.counters)
        bus = self.bus if self.policy.profile else None
        try:
            room = self._room(Device(device))
        except Exception as error:
            if partition is not None:
                partition.give_up(f"there is no room for kept inputs: {error}")
            raise
        return Keeper(room, device, partition, self.policy.prefetch, bus, self.counters.transfers)

    def _room(self, device: Device) -> Room:
        tier = self.policy.kept_in
        if tier != "nvme":
            return MemoryRoom(tier, device, self.policy.number_checkpoints)
        store = open_store(self.policy.nvme_paths, self._aio)
        store.bus = self.bus
        return StoreRoom(store, device, self.policy.buffer_bytes)

    def _synchronize(self) -> None:
        if self.policy.synchronize_checkpoint_boundary and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` and keeps its inputs only; backward runs it again.

    Gradients are those without it, bit for bit: the second run sees the first one's inputs, random numbers
    (of the CPU, of the device, of :class:`RandomStreams` and of generators among the arguments) and autocast
    state. Where the inputs wait, and
    what is kept besides, says ``activation_checkpointing`` of the model that runs (``zero_ext.prepare``), or
    of the innermost :class:`Checkpointing` entered; else they stay where they are. Without autograd it is a
    plain call.

    Arguments and results may be anything; tensors are found in nested lists, tuples and dicts. Inside a
    compiled region it is torch's own ``checkpoint``, and where inputs wait is the compiler's choice.

    Raises:
        TypeError: the function, which is to run again, returned no tensor.
        RuntimeError: it changed an input in place; the inputs of a partitioned call differ between ranks;
            there is no room for them. In backward, as :class:`torch.utils.checkpoint.CheckpointError`: it
            ran differently the second time.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return _compiled(function, args, kwargs)
    return current()(function, *args, **kwargs)


checkpoint_activations = checkpoint  # zero_ext.checkpoint has the package of checkpoints on disk as well


def current() -> Checkpointing:
    """What :func:`checkpoint` uses here: the innermost one entered in this thread, or one that only
    recomputes."""
    entered = _current.get()
    return entered[-1] if entered else Checkpointing()


def _compiled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Torch's own checkpoint in a region that is compiled. Keyword arguments are bound before: some have the
    names of its own options."""

    def bound(*given: Any) -> Any:
        return function(*given, **kwargs)

    outputs = torch_checkpoint(bound, *args, use_reentrant=False)
    check_outputs(name_of(function), outputs)
    return outputs


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast computes in on devices of ``kind``; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of a call with these arguments: the first accelerator among theirs, else the CPU."""
    found = (tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return next(found, torch.device("cpu"))


def _identity(tensor: torch.Tensor) -> object:
    """What two tensors have in common that are the same memory, seen alike."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
