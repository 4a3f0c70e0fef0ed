"""A loader that deals a data set to the ranks, tracks its position by sample, and reads ahead on a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import IterableDataset, default_collate

from zero_ext.data.sample_stream import EpochOrder, Position, SampleStream

Item = TypeVar("Item")
Collate = Callable[[list[Any]], Any]
_STATE_FORMAT = 1
_EXIT_PATIENCE_SECONDS = 10.0
_LIVENESS_SECONDS = 5.0


class MapDataset(Protocol):
    """The source of the loader: a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShardedLoader:
    """Batches of a map-style data set for one rank: shuffled, prefetched, resumable at any world size.

    The order of an epoch depends on `seed` and the epoch's number alone. All ranks walk through it together,
    `world_size * micro_batch_size` samples at a time, and each takes its own slice. So all ranks get equally
    many batches, and all batches are full.

    `for batch in loader` goes from the present position to the end of the epoch. After `break`, or after
    `load_state_dict`, the next loop goes on where the last one stood. The position counts batches handed to
    the loop. What was only prefetched is read again. There is one position, so a new loop ends an older one.

    Args:
        dataset: anything with `__len__` and `__getitem__` (`__getitems__` is used where it exists). It is
            read on another thread: augmentations that draw from torch's global generator are not repeatable.
        micro_batch_size: samples of one batch on one rank.
        rank: this rank among the data-parallel ones.
        world_size: number of data-parallel ranks.
        seed: of the order.
        shuffle: False keeps the data set's own order.
        drop_last: what happens at the end of an epoch that does not divide. False fills the last batch up
            with the next epoch's first samples, which then goes on behind them, so every sample comes exactly
            once per epoch. True leaves the remainder out.
        collate_fn: makes a batch from a list of samples; torch's `default_collate` if None.
        prefetch: batches prepared ahead by a thread; 0 prepares each when asked for it.

    Raises:
        TypeError: the data set has no length or no items (iterable-style ones are not supported).
        ValueError: a number out of range, an empty data set, or with `drop_last` one without a full batch.

    Examples:
        >>> from zero_ext.data import ShardedLoader
        >>> loader = ShardedLoader(list(range(5)), 2, shuffle=False)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 0]]
        >>> loader.state_dict()["epoch"], loader.state_dict()["sample"]
        (1, 1)
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        prefetch: int = 2,
    ) -> None:
        sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not sized or isinstance(dataset, IterableDataset):
            raise TypeError(
                "dataset: expected a map-style data set with __len__ and __getitem__ by index, got "
                f"{type(dataset).__name__}. A position by sample means nothing in a stream. Pass batches of "
                "a stream to the engine yourself."
            )
        _check_number("micro_batch_size", micro_batch_size, 1)
        _check_number("world_size", world_size, 1)
        _check_number("rank", rank, 0, world_size - 1)
        _check_number("seed", seed, None)
        _check_number("prefetch", prefetch, 0)
        samples = len(dataset)
        least = micro_batch_size * world_size if drop_last else 1
        if samples < least:
            reason = f" (micro_batch_size {micro_batch_size} x {world_size} ranks, drop_last)" * drop_last
            raise ValueError(
                f"dataset: expected a length of at least {least}{reason}, got {samples}. Pass more samples"
                + (", a smaller micro_batch_size or drop_last=False." if drop_last else ".")
            )
        self.dataset = dataset
        self.collate_fn: Collate = collate_fn or default_collate
        order = EpochOrder(samples, seed, shuffle)
        self._stream = SampleStream(order, micro_batch_size, world_size, drop_last)
        self._rank = rank
        self._prefetch = prefetch
        self._position = Position(0, 0)
        self._loop: weakref.ref[_Loop] | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch starts in, from 0."""
        return self._position.epoch

    def __len__(self) -> int:
        """Batches of an epoch that starts at its first sample; one entered further on can have fewer."""
        return self._stream.batches

    def __iter__(self) -> _Loop:
        self._end_loop("a newer loop over the same loader began")
        source = _batches(self.dataset, self.collate_fn, self._stream, self._rank, self._position)
        loop = _Loop(self, BatchPrefetcher(source, self._prefetch) if self._prefetch else source)
        self._loop = weakref.ref(loop)
        return loop

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; within that epoch already, stay, so resumed loops may call this.

        Args:
            epoch: its number, from 0.
        """
        _check_number("epoch", epoch, 0)
        if epoch != self._position.epoch:
            self._end_loop("set_epoch moved the loader's position")
            self._position = Position(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which counts batches that the loop was handed.

        Returns:
            Numbers and booleans by name, equal on all ranks.
        """
        order = self._stream.order
        return {
            "format": _STATE_FORMAT,
            "epoch": self._position.epoch,
            "sample": self._position.sample,
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, at whatever world size and batch size it was saved.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: a state of another form, or of another data set length, seed or shuffle: a position in
                another order would repeat and skip samples. The position is as it was.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own):
            seen = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"loader state: expected a mapping with the keys {sorted(own)}, got {seen}. Pass what "
                "state_dict() of a loader returned."
            )
        for key in ("format", "samples", "seed", "shuffle"):
            if type(state[key]) is not type(own[key]) or state[key] != own[key]:
                raise ValueError(
                    f"loader state: expected {key} {own[key]!r}, as this loader has, got {state[key]!r}. "
                    "Build the loader with the same data set, seed and shuffle, or start an epoch with "
                    "set_epoch."
                )
        _check_number("loader state: epoch", state["epoch"], 0)
        _check_number("loader state: sample", state["sample"], 0, own["samples"] - 1)
        self._end_loop("load_state_dict moved the loader's position")
        self._position = self._stream.normalized(state["epoch"], state["sample"])

    def _end_loop(self, reason: str) -> None:
        loop = self._loop() if self._loop is not None else None
        if loop is not None:
            loop.end(reason)
        self._loop = None


class _Loop:
    """One pass over a loader, up to the end of the epoch; moves the loader's position with each batch."""

    def __init__(self, loader: ShardedLoader, source: BatchPrefetcher[_Dealt] | Generator[_Dealt]) -> None:
        self._loader = loader
        self._source = source
        self._ended_by: str | None = None

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if self._ended_by is not None:
            raise RuntimeError(
                f"loop over the loader: it has ended: {self._ended_by}. Start a new loop with iter(loader)."
            )
        try:
            batch, self._loader._position = next(self._source)
        except StopIteration:
            raise
        except BaseException as error:
            self.end(
                f"it failed with {type(error).__name__}, and the next loop starts at the batch that failed"
            )
            raise
        return batch

    def end(self, reason: str) -> None:
        self._ended_by = reason
        self._source.close()


_Dealt = tuple[Any, Position]


def _batches(
    dataset: MapDataset, collate: Collate, stream: SampleStream, rank: int, start: Position
) -> Generator[_Dealt]:
    """Yield the rank's batches from `start` to the end of its epoch, each with the position behind it."""
    position = start
    while position.epoch == start.epoch:
        indices = stream.indices(position, rank)
        where = f"rank {rank}, epoch {position.epoch}"
        samples = _read(dataset, indices, where)
        try:
            batch = collate(samples)
        except Exception as error:
            what = f"collate_fn: it failed on samples {indices} ({where})"
            raise _failed(what, error, "Fix collate_fn or these samples.") from error
        position = stream.after(position)
        yield batch, position


def _read(dataset: MapDataset, indices: Sequence[int], where: str) -> list[Any]:
    name = type(dataset).__name__
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        try:
            samples = list(many(list(indices)))
        except Exception as error:
            what = f"{name}.__getitems__: reading samples {list(indices)} ({where}) failed"
            fix = "Repair these samples, or leave them out of the data set."
            raise _failed(what, error, fix) from error
        if len(samples) != len(indices):
            raise RuntimeError(
                f"{name}.__getitems__: expected {len(indices)} samples, one for each index, got "
                f"{len(samples)}. Return one sample for each index."
            )
        return samples
    samples = []
    for index in indices:
        try:
            samples.append(dataset[index])
        except Exception as error:
            what = f"{name}: reading sample {index} ({where}) failed"
            fix = "Repair this sample, or leave it out of the data set."
            raise _failed(what, error, fix) from error
    return samples


def _failed(what: str, error: Exception, fix: str) -> RuntimeError:
    return RuntimeError(f"{what}: {type(error).__name__}: {error}. {fix}")


def _check_number(name: str, value: object, least: int | None, most: int | None = None) -> None:
    expected = "an integer"
    if least is not None:
        expected += f" of at least {least}" if most is None else f" from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        got = f"{value!r} ({type(value).__name__})"
        raise ValueError(f"{name}: expected {expected}, got {got}. Pass an int.")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name}: expected {expected}, got {value}. Pass a number in this range.")


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
            failure, self._failure = self._failure or StopIteration(), None
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
