"""``Init``: models that are sharded while they are built, and real tensors for those on the meta device."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.tiers import is_stored
from zero_ext.offload import InitStorage
from zero_ext.zero.construction.build_units import accelerator_or_cpu, trim_heap
from zero_ext.zero.construction.module_tensors import memory_of, two_over_one_memory
from zero_ext.zero.units.collective_errors import DeferredError, raise_on_all_ranks
from zero_ext.zero.units.dtensor_local import like_parameter, local_tensor
from zero_ext.zero.units.presharded import (
    REBUILD,
    leave_init,
    presharded_of,
    shard_on_init,
    unshard_presharded,
)
from zero_ext.zero.units.released_params import METADATA, function_name

UNSHARDED_ELEMENTS_LIMIT = 8 * 1024 * 1024
Make = Callable[[torch.Tensor], torch.Tensor]


class Init:
    """Shard a model while it is built: `with zero_ext.Init(config): model = Model(...)`.

    A collective: all ranks enter and leave the block together. Each parameter is created in full, initialized
    as usual and then sharded, one after another. The same seed on every rank gives the same weights as plain
    construction, bit for bit, at every world size. Code that initializes parameters again later
    (`module.apply(init)`) sees full values. At most 8 Mi elements of the newest parameters are unsharded
    simultaneously, plus the parameters that one torch function reads and those with live views.

    Parameters made on the meta device are materialized at the end of the block by their modules'
    `reset_parameters`, in the order in which construction would have called them. The weights are those of
    plain construction unless that draws more than its modules' `reset_parameters` do (a weight made and then
    replaced by a tied one, layers made by deepcopy). Some become new parameter objects: build the optimizer
    after the block.

    Shards are stored in the tier that `config` names for parameters. On NVMe that is a store of the model's
    own. `prepare` reads its files once and removes them. They are also removed if the block raises, and after
    a crash when the next run opens the path.

    Nothing is sharded if the configured stage is not 3 (parameters are then ordinary ones of the device that
    they are built on), or on one rank without an accelerator that keeps them on the device. Shards of the
    device tier stay in host memory until [`prepare`][zero_ext.prepare] moves them to the accelerator.
    `prepare` expects the same `process_group`. Between the block and `prepare` the parameters are NaN
    placeholders.

    Args:
        config: as in `prepare`.
        process_group: the data-parallel ranks; default all, or a single rank without a launcher.

    Raises:
        ConfigError: the configuration cannot be used.
        ValueError: at the end of the block, a module with parameters on the meta device has no
            `reset_parameters`; the message names it.
        RuntimeError: on all ranks, if storage fails on any. Also when the same object is entered twice.

    Examples:
        >>> with zero_ext.Init({"stage": 3}):
        ...     model = torch.nn.Linear(4, 2)
        >>> model, _ = zero_ext.prepare(model, None, {"stage": 3})
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        settings = load_config(config)
        # The caller may be inside ``torch.device("meta")``, where the exchange would have no values.
        with torch.device("cpu"):
            join_world(settings.timeout_seconds)
            collectives = make_collectives(process_group, settings.timeout_seconds)
        # On an accelerator a single rank's parameters have to be moved as well.
        moving = settings.offload.params != "device" or accelerator_or_cpu().type != "cpu"
        self._shards = settings.stage == 3 and (collectives.world_size > 1 or moving)
        self._collectives, self._settings = collectives, settings
        self._parameters: _InitParameters | None = None
        # A dict keeps the order of construction, in which ``materialize`` draws random numbers.
        self._modules: dict[nn.Module, None] = {}
        self._entered: contextlib.ExitStack | None = None

    def __enter__(self) -> Init:
        if self._entered is not None:
            raise RuntimeError("zero_ext.Init: this one is active already. Make another one to nest.")
        with contextlib.ExitStack() as stack:
            for register, hook in (
                (registration.register_module_parameter_registration_hook, self._on_parameter),
                (registration.register_module_buffer_registration_hook, self._on_buffer),
                (registration.register_module_module_registration_hook, self._on_module),
            ):
                stack.callback(register(hook).remove)
            if self._shards:
                self._parameters = _InitParameters(self._collectives, self._settings)
                stack.enter_context(_UnshardOnUse(self._parameters))
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is None:
            raise RuntimeError("zero_ext.Init: this one was not entered. Use it in a with statement.")
        modules, parameters = list(self._modules), self._parameters
        complete = False
        try:
            with entered, torch.device("cpu"):
                if kind is None:
                    materialize(modules)
            if parameters is not None and kind is None:
                with torch._C.DisableTorchFunction():
                    parameters.refuse_aliases(modules)
                    parameters.shard_all()
                for parameter in (each for module in modules for each in module._parameters.values()):
                    if parameter is not None:
                        leave_init(parameter)
            complete = kind is None
        finally:
            self._modules.clear()
            # From here on the shards keep the storage alive, which is freed with the last of them.
            self._parameters = None
            if parameters is not None and not complete:
                parameters.storage.close()

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        self._modules[module] = None
        self._add(() if parameter is None else (parameter,))

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        self._modules[module] = None

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self._modules[module] = None
        if child is not None:
            # Copies (deepcopy, a moved submodule) come with parameters that were never registered.
            self._modules.update(dict.fromkeys(child.modules()))
            self._add(child.parameters())

    def _add(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._parameters is None:
            return
        # Registration runs under the mode below, which must not take sharding itself for a use.
        with torch._C.DisableTorchFunction():
            for parameter in parameters:
                if not is_lazy(parameter) and parameter.device.type == "cpu":
                    self._parameters.add(parameter)


class _InitParameters:
    """Unsharded parameters of an ``Init``, oldest first. The oldest are sharded when there are too many."""

    def __init__(self, collectives: Collectives, settings: ZeroConfig) -> None:
        """Create the storage of shards; a collective if that is NVMe."""

        def make() -> InitStorage:
            return InitStorage(settings.offload, settings.aio)

        self._collectives = collectives
        self._deferred = DeferredError()
        self._unsharded: OrderedDict[int, tuple[nn.Parameter, int]] = OrderedDict()
        self._elements = 0  # of all unsharded ones, as they were when they were added
        self._cut_elements = 0  # since freed memory was returned to the system
        self._by_placeholder = weakref.WeakValueDictionary[int, nn.Parameter]()
        self._by_storage = weakref.WeakValueDictionary[int, nn.Parameter]()
        self._aliases: list[tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = []
        stored = is_stored(settings.offload.params)
        self.storage = (
            raise_on_all_ranks(collectives, make, "setting up storage on NVMe") if stored else make()
        )

    def add(self, parameter: nn.Parameter) -> None:
        """Add the new ``parameter``."""
        # nn.Parameter(other_parameter) shares the other's memory and is no torch function.
        origin = self._by_placeholder.get(parameter.data_ptr()) if parameter.numel() else None
        if origin is not None and origin is not parameter:
            presharded = presharded_of(origin)
            if presharded is not None and presharded.placeholder.data_ptr() == parameter.data_ptr():
                self.unshard([origin])
                parameter.data = origin.data
        if id(parameter) not in self._unsharded and presharded_of(parameter) is None:
            self._note_alias(parameter)
            self._add_unsharded(parameter)
            self._shard_oldest(1)

    def _note_alias(self, parameter: nn.Parameter) -> None:
        memory = memory_of(parameter)
        if memory is None:
            return
        other = self._by_storage.get(memory.storage)
        seen = memory_of(other) if other is not None and other is not parameter else None
        if other is not None and seen is not None and seen.overlaps(memory):
            self._aliases.append((weakref.ref(other), weakref.ref(parameter)))
        self._by_storage[memory.storage] = parameter

    def refuse_aliases(self, modules: Iterable[nn.Module]) -> None:
        """Raise ``ValueError`` if ``modules`` have two parameters that were made over the same memory."""
        names = {
            id(parameter): f"{type(module).__name__}.{name}"
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        for one, two in self._aliases:
            first, second = names.get(id(one())), names.get(id(two()))
            if first is not None and second is not None:
                raise two_over_one_memory(first, second)

    def unshard(self, parameters: Sequence[nn.Parameter]) -> None:
        """Unshard ``parameters``, which one function is about to read or write."""
        for parameter in parameters:
            if presharded_of(parameter) is not None:
                parameter.data = unshard_presharded(parameter, self._collectives)
                self._add_unsharded(parameter)
            elif id(parameter) in self._unsharded:
                self._unsharded.move_to_end(id(parameter))
        if parameters:
            self._shard_oldest(len(parameters))

    def shard_all(self) -> None:
        """Shard everything that is still unsharded."""
        for key in list(self._unsharded):
            self._shard(key)
        self._raise_deferred()

    def _raise_deferred(self) -> None:
        self._deferred.raise_deferred(self._collectives, "storing a parameter of zero_ext.Init", REBUILD)

    def _add_unsharded(self, parameter: nn.Parameter) -> None:
        _, before = self._unsharded.pop(id(parameter), (parameter, 0))
        self._unsharded[id(parameter)] = parameter, parameter.numel()
        self._elements += parameter.numel() - before

    def _shard_oldest(self, spared: int) -> None:
        if self._elements <= UNSHARDED_ELEMENTS_LIMIT:
            return
        for key in list(self._unsharded)[: len(self._unsharded) - spared]:
            # What is written through a view would be lost: weight.data[padding] = 0, in several statements.
            if not _has_views(self._unsharded[key][0]):
                self._shard(key)
            if self._elements <= UNSHARDED_ELEMENTS_LIMIT:
                return

    def _shard(self, key: int) -> None:
        parameter, elements = self._unsharded.pop(key)
        self._elements -= elements
        self._cut_elements += elements
        if presharded_of(parameter) is None:
            shard_on_init(parameter, self._collectives, self.storage, self._deferred)
            # A single rank needs no agreement, so it stops at the first failure.
            if self._collectives.world_size == 1:
                self._raise_deferred()
            self._by_placeholder[parameter.data_ptr()] = parameter
        if self._cut_elements > UNSHARDED_ELEMENTS_LIMIT:
            self._cut_elements = 0
            trim_heap()


def _has_views(parameter: nn.Parameter) -> bool:
    """Return whether anything but ``parameter`` and the storage object asked uses its memory."""
    storage = parameter.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2


class _UnshardOnUse(TorchFunctionMode):
    """Unshards parameters before any torch function uses them, except for metadata."""

    def __init__(self, parameters: _InitParameters) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(func) not in METADATA:
            values = (*args, *(kwargs or {}).values())
            items = (each if isinstance(each, list | tuple) else (each,) for each in values)
            found = {id(item): item for item in itertools.chain(*items) if isinstance(item, nn.Parameter)}
            with torch._C.DisableTorchFunction():
                self._parameters.unshard(list(found.values()))
        return func(*args, **(kwargs or {}))


def materialize(modules: Iterable[nn.Module]) -> None:
    """Replace the meta tensors of ``modules``, in order of construction, and initialize them.

    Children come before their parents: a constructor makes its submodules, and their constructors initialize
    them, and calls its own ``reset_parameters`` at its end. Tied parameters stay tied. Raises ``ValueError``
    for meta tensors that no ``reset_parameters`` of their module initializes.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    done: dict[nn.Module, bool] = {}
    for module in modules:
        _visit(module, made, done)


def _visit(module: nn.Module, made: dict[torch.Tensor, torch.Tensor], done: dict[nn.Module, bool]) -> bool:
    """Return whether ``module``, or one inside it, had meta tensors."""
    if module in done:
        return done[module]
    done[module] = False
    inside = [_visit(child, made, done) for child in module.children()]
    fresh = _replace(module, made, lambda old: torch.empty_like(old, device="cpu"))
    if fresh or any(inside):
        done[module] = True
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif fresh:
            raise ValueError(
                f"module {type(module).__name__}, built on the meta device with {fresh}: expected a "
                "reset_parameters to initialize them, got none. Build it inside zero_ext.Init without "
                "torch.device('meta'), or pass init='skip' to zero_ext.prepare and load a checkpoint."
            )
    return done[module]


def leave_meta(model: nn.Module) -> None:
    """Replace meta parameters by zeros without memory, and meta buffers by zeros, to be loaded later.

    Buffers outside the state dict stay on the meta device, with a warning: no checkpoint would fill them.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    left: list[str] = []
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                made[buffer] = buffer
                left.append(f"{prefix}.{name}" if prefix else name)
    for module in model.modules():
        _replace(module, made, _zeros)
    if left:
        warnings.warn(
            f"buffers {sorted(left)} stay on the meta device: they are not part of the state dict, so no "
            "checkpoint fills them. Give them values before the first forward.",
            RuntimeWarning,
            stacklevel=3,
        )


def _zeros(old: torch.Tensor) -> torch.Tensor:
    if isinstance(old, nn.Parameter):
        zeros = torch.zeros((), dtype=old.dtype, device="cpu").expand(local_tensor(old).shape)
        return like_parameter(old, zeros)
    return torch.zeros_like(old, device="cpu")


def _replace(module: nn.Module, made: dict[torch.Tensor, torch.Tensor], make: Make) -> list[str]:
    """Replace the meta tensors of ``module`` by real ones; return the names of those not yet in ``made``."""
    fresh = []
    for tensors in (module._parameters, module._buffers):
        for name, old in list(tensors.items()):
            if old is None or not old.is_meta:
                continue
            if old not in made:
                fresh.append(name)
                made[old] = _moved(old, make(old)) if isinstance(old, nn.Parameter) else make(old)
            if tensors is module._buffers:
                module._buffers[name] = made[old]
            else:
                setattr(module, name, made[old])
    return fresh


def _moved(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """``parameter`` itself with another tensor inside, or a new one where something holds the old one weakly
    (recurrent modules do)."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))  # what it is marked with
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError:
        return new
    return parameter
