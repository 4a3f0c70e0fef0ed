"""The contexts around a call and around its recomputation: what a second run needs to be as the first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from zero_ext.activation.random_streams import RandomStreams
from zero_ext.config.events import ActivationEnd, Bus

Context = contextlib.AbstractContextManager[Any]


class NamedErrors:
    """Inside a call that torch checkpoints, its errors of backward name the call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hooks: Any = None

    def __enter__(self) -> None:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        name = self._name

        def named(packed: Any) -> torch.Tensor:
            try:
                return unpack(packed)
            except CheckpointError as error:
                first = str(error).partition("\nTip:")[0].strip()
                raise CheckpointError(
                    f"{name}: it ran differently in backward than in forward, where it was checkpointed: "
                    f"{first} Make it depend on its arguments alone, and not on what changes in between."
                ) from error

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, named)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._hooks = None


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
        self._name = name
        self._streams = streams
        self._states = streams.get_states()
        self._generators = [(each, each.get_state()) for each in generators]
        self._current = current
        self._bus = bus
        self._synchronize = synchronize
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def _publish(self, bus: Bus, began: float) -> None:
        bus.publish(ActivationEnd("recompute", self._name, began, time.perf_counter() - began, 0))


@contextlib.contextmanager
def nested_contexts(*contexts: Context) -> Any:
    """Enter several contexts as one."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
