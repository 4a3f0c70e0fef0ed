"""``checkpoint_activations``: recompute a call in backward, with its inputs stored per configuration."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_ext.activation.activation_storage import (
    ActivationStorage,
    MemoryActivationStorage,
    NvmeActivationStorage,
)
from zero_ext.activation.checkpoint_call import (
    CheckpointedCall,
    Context,
    Recomputation,
    check_outputs,
    check_unchanged,
    code_of,
    is_parameter,
    modules_of,
    name_of,
    named_errors,
    nested_contexts,
    versions,
)
from zero_ext.activation.offload_saved_tensors import OffloadSavedTensors, Stays, UnmovedTensor
from zero_ext.activation.offloader import ActivationOffloader, ActivationRecord
from zero_ext.activation.packed_layout import fits
from zero_ext.activation.partitioned_activations import ActivationPartition, TransferCounters, check_group
from zero_ext.activation.random_streams import RandomStreams
from zero_ext.activation.selective_policy import (
    Contexts,
    MeasuringMode,
    Step,
    choose,
    contexts_saving_ops,
    contexts_saving_steps,
    named_ops,
)
from zero_ext.config import ActivationCheckpointingConfig, AioConfig
from zero_ext.config.events import Bus
from zero_ext.config.tiers import TIERS, Tier, is_stored, other_tiers
from zero_ext.offload import Device
from zero_ext.offload.tier_manager import open_store

# Calls of different modules, modes and sizes whose plans are cached. The oldest one is evicted.
_MAX_PLANS = 1024
# Recent input tensors. Dead ones count too, so that ranks that share inputs forget the same ones.
_MAX_RECENT_INPUTS = 1024
# The ones entered in a thread, the innermost last.
_current: ContextVar[tuple[ActivationCheckpointing, ...]] = ContextVar("zero_ext_checkpointing", default=())


class ActivationCheckpointing:
    """Checkpoint calls as `config` says; call it as `checkpointing(function, *args, **kwargs)`.

    Several threads may use it simultaneously. Where inputs are partitioned, their calls would have to come
    in one order on all ranks.

    As a context manager it is what [`checkpoint_activations`][zero_ext.checkpoint_activations] uses inside,
    in this thread. At its end nothing that was moved is left on the device. [`prepare`][zero_ext.prepare]
    runs the model's forward in one.

    Args:
        config: the tier of inputs, and what is saved besides.
        group: ranks that hold identical inputs, for `config.partition_activations`.
        data_parallel_group: ranks that do not; `group` may share no two ranks with it.
        aio: how files on NVMe are read and written.
        stays: whether a tensor must not be moved; parameters and their views never are.
        streams: random number streams that functions continue, restored for recomputation.
        counters: counts what is moved; new ones unless given.
        timeout_seconds: longest wait for another rank of `group`.

    Attributes:
        config: as given.
        counters: as given.
        streams: as given.

    Raises:
        ValueError: the group cannot share activations, or `config.save_ops` names an op that does not
            exist or a collective.

    Examples:
        >>> from zero_ext.activation import ActivationCheckpointing
        >>> from zero_ext.config import ActivationCheckpointingConfig
        >>> layer = torch.nn.Linear(4, 4)
        >>> checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host"))
        >>> checkpointing(layer, torch.ones(2, 4)).sum().backward()
        >>> layer.bias.grad
        tensor([2., 2., 2., 2.])
    """

    def __init__(
        self,
        config: ActivationCheckpointingConfig = ActivationCheckpointingConfig(),  # noqa: B008 - frozen
        group: dist.ProcessGroup | None = None,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        aio: AioConfig = AioConfig(),  # noqa: B008 - frozen
        stays: Stays = lambda tensor: False,
        streams: RandomStreams | None = None,
        counters: TransferCounters | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if group is not None:
            check_group(group, data_parallel_group)
        self.config = config
        self.counters = TransferCounters() if counters is None else counters
        self.streams = RandomStreams() if streams is None else streams
        self._group, self._data_parallel_group = group, data_parallel_group
        self._aio, self._stays, self._timeout_seconds = aio, stays, timeout_seconds
        self._ops = named_ops(config.save_ops)
        self._lock = threading.RLock()  # of the attributes below
        self._plans: dict[object, frozenset[Step]] = {}
        self._offloaders: dict[torch.device, ActivationOffloader] = {}
        # Recent input tensors, the newest last, with their versions: an input of two calls is not moved.
        # The weak reference keeps the storage object's address from being used again.
        self._recent_inputs: dict[object, tuple[StorageWeakRef, int]] = {}

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` as a checkpointed call.

        Args:
            function: what is run, and run again in backward.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Returns:
            What `function` returns.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _compiled(function, args, kwargs)
        if self.config.mode == "offload_saved_tensors":
            with self.saved_tensors(*modules_of(function)):
                return function(*args, **kwargs)
        call = CheckpointedCall(function, args, kwargs)
        self._synchronize()
        inputs = call.release_tensors()
        before = versions(inputs)
        with self._offloading(call.name, inputs):
            outputs = torch_checkpoint(
                call.run,
                *inputs,
                use_reentrant=False,
                context_fn=lambda: self._contexts(call, inputs, function),
            )
        check_unchanged(call.name, inputs, before)
        check_outputs(call.name, outputs)
        self._synchronize()
        return outputs

    def saved_tensors(self, *modules: nn.Module) -> Context:
        """Store what autograd saves inside in the configured tier, and recompute nothing.

        Parameters and their views stay where they are: those of the model given to `prepare`, gathered or
        not, those of `modules`, whatever sees their memory, and any other ones. Tensors are moved to host
        memory or storage as they are saved.

        Args:
            *modules: their parameters stay.

        Returns:
            A context manager.

        Raises:
            ValueError: the configured tier is the device.
        """
        if self.config.storage_tier == "device":
            raise ValueError(
                f"activation_checkpointing.tier: expected {other_tiers()} to offload saved tensors, got "
                f"'device', where they are already. Set it to {other_tiers()}."
            )
        with torch._C.DisableTorchFunctionSubclass():  # those that ZeRO has released have no memory to name
            own = {each.untyped_storage()._cdata for module in modules for each in module.parameters()}

        def stays(tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage()._cdata
            return is_parameter(tensor) or storage in own or self._stays(tensor)

        return OffloadSavedTensors(self._offloader, self.config.min_offload_bytes, stays)

    @property
    def bus(self) -> Bus:
        """The bus on which the work is published, with `config.profile`."""
        return self.counters.bus

    def used_bytes(self) -> int:
        """Return the bytes of inputs or saved tensors that this rank stores now in the configured tier.

        Returns:
            Bytes.
        """
        return sum(offloader.used_bytes() for offloader in tuple(self._offloaders.values()))

    def allocated_bytes(self) -> dict[Tier, int]:
        """Return the bytes of memory and storage allocated for inputs or saved tensors, in use or not.

        Returns:
            Bytes by tier.
        """
        held = [each.allocated_bytes() for each in tuple(self._offloaders.values())]
        return {tier: sum(each.get(tier, 0) for each in held) for tier in TIERS}

    def __enter__(self) -> ActivationCheckpointing:
        _current.set((*_current.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.set(_current.get()[:-1])
        for offloader in tuple(self._offloaders.values()):  # other threads may add theirs
            offloader.release_sources()

    @contextlib.contextmanager
    def _offloading(self, name: str, inputs: list[torch.Tensor]) -> Iterator[None]:
        """Inside, torch saves the tensors of a call in the configured storage, where it has one.

        Inside another checkpointed call, or other hooks of saved tensors, these decide.
        """
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        device = _device_of(inputs)
        moved = [] if hooked or not self.config.moves else self._to_move(inputs, device)
        if self.config.partition_activations and inputs and not hooked:
            # With nothing to move too: the other ranks, which may have something, would wait.
            self._offloader(device).compare(moved, name)
        if not moved:
            yield
            return
        offloader = self._offloader(device)
        record = offloader.offload(moved, name)
        indices = {_identity(tensor): index for index, tensor in enumerate(moved)}

        def pack(tensor: torch.Tensor) -> tuple[ActivationRecord, int] | UnmovedTensor:
            index = indices.get(_identity(tensor))
            if index is None:
                return UnmovedTensor.of(tensor)
            record.add_receiver(index)
            return record, index

        def unpack(packed: tuple[ActivationRecord, int] | UnmovedTensor) -> torch.Tensor:
            return packed.get() if isinstance(packed, UnmovedTensor) else offloader.fetch(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _to_move(self, inputs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of a call on ``device`` that move, each memory once."""
        found: dict[object, torch.Tensor] = {}
        for tensor in inputs:
            if tensor.device != device or not fits(tensor) or is_parameter(tensor) or tensor.is_inference():
                continue
            if tensor.nbytes >= self.config.min_offload_bytes and not self._stays(tensor):
                found.setdefault(_identity(tensor), tensor)
        with self._lock:
            return [tensor for tensor in found.values() if not self._was_input_before(tensor)]

    def _was_input_before(self, tensor: torch.Tensor) -> bool:
        """Return whether another call had the same tensor, unchanged since.

        Another view of its memory is another tensor: each slice of one may be the input of one call only.
        """
        storage = tensor.untyped_storage()
        key = (storage._cdata, _identity(tensor))
        _, version = self._recent_inputs.pop(key, (None, None))
        self._recent_inputs[key] = StorageWeakRef(storage), tensor._version
        if len(self._recent_inputs) > _MAX_RECENT_INPUTS:
            del self._recent_inputs[next(iter(self._recent_inputs))]
        return version == tensor._version

    def _contexts(
        self, call: CheckpointedCall, inputs: list[torch.Tensor], function: Callable[..., Any]
    ) -> Contexts:
        first, second = self._modes(call.name, inputs, function)
        bus = self.bus if self.config.profile else None
        current = partial(nested_contexts, self, second)
        again = Recomputation(call.name, self.streams, call.generators, current, bus, self._synchronize)
        return nested_contexts(named_errors(call.name), first), again

    def _modes(self, name: str, inputs: list[torch.Tensor], function: Callable[..., Any]) -> Contexts:
        """Contexts that save some of a call's results: for its first run, and for its recomputation."""
        if self._ops:
            return contexts_saving_ops(self._ops)
        budget = self.config.save_budget_bytes
        if budget is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        # Not all that decides what a call computes: what varies from call to call would never have a plan.
        code, modules = code_of(function)
        states = [(weakref.ref(module), module.training) for module in modules]
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        kinds = sorted({"cpu", *(tensor.device.type for tensor in inputs)})
        key = (name, code, *states, *shapes, *map(_autocast, kinds))
        plan = self._plans.get(key)
        if plan is not None:
            return contexts_saving_steps(plan, budget)
        return self._measured(key, budget, inputs), contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self, key: object, budget: int, inputs: list[torch.Tensor]) -> Iterator[None]:
        with MeasuringMode(inputs[0].device if inputs else torch.device("cpu")) as mode:
            yield
        with self._lock:
            self._plans[key] = choose(mode.steps, budget)
            if len(self._plans) > _MAX_PLANS:
                del self._plans[next(iter(self._plans))]

    def _offloader(self, device: torch.device) -> ActivationOffloader:
        with self._lock:
            if device not in self._offloaders:
                self._offloaders[device] = self._new_offloader(device)
            return self._offloaders[device]

    def _new_offloader(self, device: torch.device) -> ActivationOffloader:
        partition = None
        if self.config.partition_activations:
            check_group(self._group, self._data_parallel_group)
            if self._group is not None:
                partition = ActivationPartition(self._group, device, self._timeout_seconds, self.counters)
        bus = self.bus if self.config.profile else None
        try:
            storage = self._new_storage(Device(device))
        except Exception as error:
            if partition is not None:
                partition.abort(f"the storage of inputs could not be allocated: {error}")
            raise
        return ActivationOffloader(
            storage, device, partition, self.config.prefetch, bus, self.counters.transfers
        )

    def _new_storage(self, device: Device) -> ActivationStorage:
        if not is_stored(self.config.storage_tier):
            return MemoryActivationStorage(self.config.storage_tier, device, self.config.number_checkpoints)
        store = open_store(self.config.nvme_paths, self._aio)
        store.bus = self.bus
        return NvmeActivationStorage(store, device, self.config.buffer_bytes)

    def _synchronize(self) -> None:
        if self.config.synchronize_checkpoint_boundary and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def checkpoint_activations(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)`, store only its inputs, and run it again in backward.

    Gradients are bitwise equal to those without it. The second run has the inputs of the first one, its
    random numbers (of the CPU, of the device, of `RandomStreams` and of generators among the
    arguments) and its autocast state. The section `activation_checkpointing` of the model that runs
    ([`prepare`][zero_ext.prepare]) configures where inputs are stored and which results are saved too.
    Outside such a model the innermost
    [`ActivationCheckpointing`][zero_ext.activation.ActivationCheckpointing] entered does so, and without one
    the inputs stay where they are. Without autograd it is a plain call.

    Inside a compiled region it is torch's own `checkpoint`, and the compiler chooses where inputs are stored.

    Args:
        function: what is run, and run again in backward.
        *args: its arguments, of any type; tensors are found in nested lists, tuples and dicts.
        **kwargs: its keyword arguments, likewise.

    Returns:
        What `function` returns.

    Raises:
        TypeError: the function, which is to run again, returned no tensor.
        RuntimeError: it changed an input in place; the inputs of a partitioned call differ between ranks;
            there is no space for them. In backward, as `torch.utils.checkpoint.CheckpointError`: it
            ran differently the second time.

    Examples:
        >>> layer = torch.nn.Linear(4, 4)
        >>> hidden = zero_ext.checkpoint_activations(layer, torch.ones(2, 4))
        >>> hidden.sum().backward()  # runs the layer again
        >>> layer.bias.grad
        tensor([2., 2., 2., 2.])
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return _compiled(function, args, kwargs)
    return current_checkpointing()(function, *args, **kwargs)


def current_checkpointing() -> ActivationCheckpointing:
    """Return what `checkpoint_activations` uses in this thread.

    Returns:
        The innermost `ActivationCheckpointing` entered, or one that only recomputes.
    """
    entered = _current.get()
    return entered[-1] if entered else ActivationCheckpointing()


def _compiled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Torch's own checkpoint in a region that is compiled. Keyword arguments are bound before: some have the
    names of its own options."""

    def bound(*inputs: Any) -> Any:
        return function(*inputs, **kwargs)

    outputs = torch_checkpoint(bound, *args, use_reentrant=False)
    check_outputs(name_of(function), outputs)
    return outputs


def _autocast(kind: str) -> torch.dtype | None:
    """Return what autocast computes in on devices of ``kind``; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of a call with these arguments: the first accelerator among theirs, else the CPU."""
    found = (tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return next(found, torch.device("cpu"))


def _identity(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are the same memory, seen alike."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
