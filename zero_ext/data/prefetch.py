"""Runs an iterator ahead of its consumer on a thread that never outlives it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_EXIT_PATIENCE_SECONDS = 10.0
_LIVENESS_SECONDS = 5.0


class BatchPrefetcher(Generic[Item]):
    """Iterates over `source` on a thread of its own, at most `depth` items ahead of the consumer.

    An exception of `source` is raised at the consumer, in its place behind the items before it. The thread
    ends, after the item it is at, when the prefetcher is closed or dropped or the interpreter exits.
    """

    def __init__(self, source: Generator[Item], depth: int) -> None:
        if depth < 1:
            raise ValueError(
                f"depth: expected at least 1, got {depth}. Pass the number of batches to prefetch."
            )
        self._channel = _Channel[Item](depth)
        # The thread refers to the channel and the source only: dropping this object can stop it.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._channel), name="zero_ext-prefetch", daemon=True
        )
        weakref.finalize(self, self._channel.stop).atexit = False
        weakref.finalize(self._thread, _stop_and_join, self._channel, weakref.ref(self._thread))
        self._thread.start()

    def __iter__(self) -> BatchPrefetcher[Item]:
        return self

    def __next__(self) -> Item:
        return self._channel.get(self._thread)

    def close(self) -> None:
        """Stop the thread after the item it is at and drop what was prefetched; iteration is over."""
        self._channel.stop()


class _Channel(Generic[Item]):
    """Bounded hand-over between the two threads.

    Its lock is reentrant: a garbage collection inside a locked section may finalise a prefetcher, which
    stops a channel on the same thread.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._failure: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition(threading.RLock())

    def wait_for_capacity(self) -> bool:
        """Block the producer until another item is needed; return False when none is any more."""
        with self._changed:
            while not self._ended and len(self._ready) >= self._depth:
                self._changed.wait()
            return not self._ended

    def put(self, item: Item) -> None:
        with self._changed:
            if not self._ended:
                self._ready.append(item)
                self._changed.notify_all()

    def finish(self, failure: BaseException | None) -> None:
        with self._changed:
            if not self._ended:
                self._failure, self._ended = failure, True
                self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._failure = None
            self._ready.clear()
            self._changed.notify_all()

    def get(self, producer: threading.Thread) -> Item:
        with self._changed:
            while not self._ready and not self._ended:
                if not producer.is_alive():
                    raise RuntimeError(
                        "loop over the loader: the prefetching thread is gone, since this process was forked "
                        "after the loop began. Start a new loop in the child."
                    )
                self._changed.wait(_LIVENESS_SECONDS)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            failure, self._failure = self._failure, None
        if failure is None:
            raise StopIteration
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame: a cycle that would keep the data set alive


def _produce(source: Generator[Item], channel: _Channel[Item]) -> None:
    failure: BaseException | None = None
    try:
        while channel.wait_for_capacity():
            channel.put(next(source))
    except StopIteration:
        pass
    except BaseException as error:  # also SystemExit: the consumer must hear of it, not wait for ever
        failure = error
    finally:
        source.close()
        channel.finish(failure)


def _stop_and_join(channel: _Channel[Item], thread: weakref.ref[threading.Thread]) -> None:
    """At exit: a daemon thread inside a torch op while the interpreter goes down would crash the process."""
    channel.stop()
    running = thread()
    if running is not None and running is not threading.current_thread():
        running.join(_EXIT_PATIENCE_SECONDS)
