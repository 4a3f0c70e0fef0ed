"""One checkpointed call: its arguments as a flat list of tensors, what is checked of it, and its contexts."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from zero_ext.activation.random_streams import RandomStreams
from zero_ext.config.events import ActivationEnd, Bus

Context = contextlib.AbstractContextManager[Any]
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def name_of(function: Callable[..., Any]) -> str:
    """Return what errors call a function."""
    function = _unbound(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return f"{type(owner).__qualname__}.{function.__name__}"
    return getattr(function, "__qualname__", type(function).__qualname__)


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the module that ``function`` is, or is a method of."""
    function = _unbound(function)
    owner = getattr(function, "__self__", function)
    return [owner] if isinstance(owner, nn.Module) else []


def code_of(function: Callable[..., Any]) -> tuple[object, list[nn.Module]]:
    """Its code, or its type, and the modules that it is, is a method of, or holds: bound to it, as a default,
    or in its closure."""
    held: list[object] = []
    function = _unbound(function, held)
    held.append(getattr(function, "__self__", function))
    function = getattr(function, "__func__", function)
    held += getattr(function, "__defaults__", None) or ()
    held += (getattr(function, "__kwdefaults__", None) or {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            held.append(cell.cell_contents)
    code = getattr(function, "__code__", type(function))
    return code, [each for each in held if isinstance(each, nn.Module)]


def _unbound(function: Callable[..., Any], bound: list[object] | None = None) -> Callable[..., Any]:
    """Return the function inside of partial ones; their arguments are added to ``bound``."""
    while isinstance(function, functools.partial):
        if bound is not None:
            bound += [*function.args, *function.keywords.values()]
        function = function.func
    return function


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a parameter or a view of one, such as ``weight.t()``."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


class CheckpointedCall:
    """``function(*args, **kwargs)``, to be run with its arguments and again with other ``tensors``.

    The tensors are those found in nested lists, tuples, dicts and what else torch's pytrees support; objects
    that they do not support are kept as they are, with whatever they hold.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.name = name_of(function)
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.generators = [leaf for leaf in self._others if isinstance(leaf, torch.Generator)]
        self._function = function
        # The first run gets the caller's own containers, which it may look into or change.
        self._first_arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = (args, kwargs)

    def release_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, and drop the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def run(self, *tensors: torch.Tensor) -> Any:
        """Return the function's result."""
        arguments, self._first_arguments = self._first_arguments, None
        if arguments is not None:
            return self._function(*arguments[0], **arguments[1])
        tensor, other = iter(tensors), iter(self._others)
        leaves = [next(tensor) if is_tensor else next(other) for is_tensor in self._is_tensor]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the tensors' versions, for :func:`check_unchanged`."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def check_unchanged(name: str, tensors: Sequence[torch.Tensor], before: Sequence[int]) -> None:
    """``RuntimeError`` if the call has changed one of its input tensors."""
    for number, (tensor, old, new) in enumerate(zip(tensors, before, versions(tensors), strict=True)):
        if new != old:
            raise RuntimeError(
                f"{name}: it changed its input tensor {number}, of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}, in place, so backward would recompute from other values. Work on a copy "
                "inside the function (tensor.clone()), and return it."
            )


def check_outputs(name: str, outputs: Any) -> None:
    """``TypeError`` if the call returned nothing that backward could come from."""
    leaves = pytree.tree_leaves(outputs)
    if all(isinstance(leaf, _PLAIN) for leaf in leaves):
        raise TypeError(
            f"{name}: expected an output with a tensor, got {type(outputs).__name__} without one, so "
            "backward would never recompute it. Return the tensors that later code computes from, or call "
            "the function directly."
        )


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Inside a call that torch checkpoints, its errors of backward name the call."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def named(packed: Any) -> torch.Tensor:
        try:
            return unpack(packed)
        except CheckpointError as error:
            first = str(error).partition("\nTip:")[0].strip()
            raise CheckpointError(
                f"{name}: it ran differently in backward than in forward, where it was checkpointed: "
                f"{first} Make it depend on its arguments alone, and not on what changes in between."
            ) from error

    with torch.autograd.graph.saved_tensors_hooks(pack, named):
        yield


class Recomputation:
    """The context of every recomputation of one call; entered again where backward is repeated.

    ``streams``, and the ``generators`` that the call was given, continue from where they were when this was
    made, and go back afterwards; ``current`` makes the contexts that a recomputation needs besides. The
    duration is published on ``bus``.
    """

    def __init__(
        self,
        name: str,
        streams: RandomStreams,
        generators: Sequence[torch.Generator],
        current: Callable[[], Context],
        bus: Bus | None,
        synchronize: Callable[[], None],
    ) -> None:
        self._name, self._bus, self._current, self._synchronize = name, bus, current, synchronize
        self._streams, self._states = streams, streams.get_states()
        self._generators = [(each, each.get_state()) for each in generators]
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        self._synchronize()
        with contextlib.ExitStack() as stack:
            if self._bus:
                stack.callback(self._publish, self._bus, time.perf_counter())
            stack.callback(self._synchronize)
            stack.callback(self._streams.set_states, self._streams.get_states())
            self._streams.set_states(self._states)
            for generator, state in self._generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            stack.enter_context(self._current())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def _publish(self, bus: Bus, began: float) -> None:
        bus.publish(ActivationEnd("recompute", self._name, began, time.perf_counter() - began, 0))


@contextlib.contextmanager
def nested_contexts(*contexts: Context) -> Any:
    """Enter several contexts as one."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
