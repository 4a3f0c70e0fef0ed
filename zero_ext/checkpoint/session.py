"""What saves of one source share: the save in flight, and a process group for work in the background."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_ext.checkpoint.errors import CheckpointError
from zero_ext.checkpoint.source import StateSource


class _Outcome:
    """How a save ended; shared by the handle, the thread and whoever reports an error nobody asked for."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def report_unseen(self) -> None:
        """Last resort, when the handle goes or the process ends: an error must not pass in silence."""
        if self.error is not None:
            text = f"zero_ext: {self.path} was not saved, and nobody has waited for it: {self.error}"
            print(text, file=sys.stderr, flush=True)


class SaveHandle:
    """A save that is done or under way. ``step`` and ``path`` say what it makes.

    An error of a background save is raised once: by ``wait``, or by the next save or load of the same model.
    If neither comes, it is printed to stderr when the handle is dropped or the process ends. The process ends
    only after the save has.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._outcome = _Outcome(step, path)
        weakref.finalize(self, self._outcome.report_unseen)

    def done(self) -> bool:
        """True once the save has ended, well or not."""
        return self._outcome.finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Path:
        """Blocks until the checkpoint is committed and returns its directory.

        TimeoutError after ``timeout_seconds``; the save's own error if it failed and was not raised before.
        """
        if not self._outcome.finished.wait(timeout_seconds):
            raise TimeoutError(f"{self.path}: the save is still under way after {timeout_seconds} s")
        error, self._outcome.error = self._outcome.error, None
        if error is not None:
            raise error
        return self.path

    def run(self, save: Callable[[], None]) -> SaveHandle:
        """Does the save now; an error is raised here."""
        try:
            save()
        finally:
            self._outcome.finished.set()
        return self

    def run_in_background(self, save: Callable[[], None], owner: StateSource) -> SaveHandle:
        """Does the save on a thread that the process waits for at its end.

        ``owner`` lives until then: its process group, which the save agrees over, goes with it.
        """
        outcome = self._outcome

        def work(owner: StateSource = owner) -> None:
            try:
                save()
            except BaseException as error:
                outcome.error = error
            finally:
                outcome.finished.set()

        threading.Thread(target=work, name=f"save {self.path.name}", daemon=False).start()
        return self


class Session:
    """Saves and loads of one source come one after another; this holds what they leave for the next."""

    def __init__(self) -> None:
        self.in_flight: SaveHandle | None = None
        self._background: dist.ProcessGroup | None = None

    def finish_previous(self) -> None:
        """Waits for the save in flight. CheckpointError if it failed and nobody has been told."""
        handle, self.in_flight = self.in_flight, None
        if handle is None:
            return
        try:
            handle.wait()
        except Exception as error:
            raise CheckpointError(f"the previous save, {handle.path.name}, failed: {error}") from error

    def group_for(self, source: StateSource, background: bool) -> dist.ProcessGroup | None:
        """The group to agree over: the source's own, or a gloo group beside it.

        A background save must not mix its collectives with the training step's, and bytes of host memory
        need a backend that moves them. The second group is made once, by all ranks together.
        """
        group = source.group
        if group is None or source.world_size == 1:
            return None
        if not background and dist.get_backend(group) == dist.Backend.GLOO:
            return group
        if self._background is None:
            self._background = dist.new_group(
                ranks=dist.get_process_group_ranks(group),
                backend=dist.Backend.GLOO,
                timeout=timedelta(seconds=source.config.timeout_seconds),
                use_local_synchronization=True,
            )
            weakref.finalize(source, _destroy, self._background)
        return self._background


def _destroy(group: dist.ProcessGroup) -> None:
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


# A source knows nothing of checkpoints, and a save in flight has to be found again from the source alone.
_sessions: WeakKeyDictionary[StateSource, Session] = WeakKeyDictionary()


def session_of(source: StateSource) -> Session:
    """The session of ``source``, which lives as long as it does."""
    return _sessions.setdefault(source, Session())
