"""One thread that runs calls in order, so that input and output overlap with hashing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class IoThread:
    """A thread that runs submitted calls one after another; leaving the context waits for all of them.

    Executors of the standard library refuse work once the main thread has ended, and a save under way then
    still has to finish; this thread does not.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    def __enter__(self) -> IoThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.put(None)
        self._thread.join()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues ``call``; its result or exception arrives in the future."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
