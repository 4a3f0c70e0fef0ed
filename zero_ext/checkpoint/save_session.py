"""The session that the saves and loads of one source share: the save in flight, and connections between the
ranks.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.state_source import StateSource

_STORE_PREFIX = "zero_ext.checkpoint"


class SaveHandle:
    """A save that is done or in progress.

    An error of a background save is raised by `wait`, else by the next save or load of the same model. If
    neither comes, it is printed to stderr when the handle is dropped or the process ends. The process ends
    only after the save has.

    Args:
        step: number of the checkpoint.
        path: its folder.

    Attributes:
        step: as given.
        path: as given.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._finished = threading.Event()
        self._error: BaseException | None = None
        # Not the error itself: its traceback leads back here, and the handle would live for ever.
        self._unseen: list[str] = []
        weakref.finalize(self, _report, self._unseen)

    def done(self) -> bool:
        """Return whether the save has ended, well or not.

        Returns:
            True once it has.
        """
        return self._finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Path:
        """Block until the checkpoint is committed.

        Args:
            timeout_seconds: longest wait; None waits forever.

        Returns:
            The folder of the checkpoint.

        Raises:
            TimeoutError: the save is still in progress after `timeout_seconds`.
            CheckpointError: the save failed. Other errors of the save are raised as they are.
        """
        if not self._finished.wait(timeout_seconds):
            raise TimeoutError(
                f"{self.path}: the save is still in progress after {timeout_seconds} s. Wait again."
            )
        self._unseen.clear()
        if self._error is not None:
            raise self._error
        return self.path

    def raise_unseen(self) -> None:
        """Wait for the end of the save, and raise its error if it has not been raised yet.

        Raises:
            CheckpointError: the save failed.
        """
        self._finished.wait()
        if self._unseen and self._error is not None:
            self._unseen.clear()
            raise CheckpointError(
                f"previous save, {self.path.name}: it failed. {self._error}"
            ) from self._error

    def run(self, save: Callable[[], None]) -> SaveHandle:
        """Save now; an error is raised here.

        Args:
            save: writes the checkpoint.

        Returns:
            The handle itself.
        """
        try:
            save()
        finally:
            self._finished.set()
        return self

    def run_in_background(self, save: Callable[[], None]) -> SaveHandle:
        """Save on a thread that the process waits for at its end.

        Args:
            save: writes the checkpoint.

        Returns:
            The handle itself.
        """
        threading.Thread(target=self._work, args=(save,), name=f"save {self.path.name}", daemon=False).start()
        return self

    def _work(self, save: Callable[[], None]) -> None:
        # Running as a method keeps the handle, and with it the report of an error, until the end.
        try:
            save()
        except BaseException as error:
            # The frames below hold the staged copy of the state.
            traceback.clear_frames(error.__traceback__)
            self._error = error
            self._unseen.append(f"zero_ext: {self.path} was not saved, and nobody has waited for it: {error}")
        finally:
            self._finished.set()


def _report(unseen: list[str]) -> None:
    for text in unseen:
        print(text, file=sys.stderr, flush=True)


class SaveSession:
    """Saves and loads of one source come one after another; this holds what they leave for the next."""

    def __init__(self) -> None:
        self.in_flight: SaveHandle | None = None
        self._groups: list[dist.ProcessGroupGloo] = []  # one, once it is made
        # At interpreter exit the threads of gloo must end before the interpreter goes: they drop tensors, and
        # one that asks for the interpreter's lock after that ends the process.
        weakref.finalize(self, self._groups.clear)

    def finish_previous(self) -> None:
        """Wait for the save in flight. CheckpointError if it failed and it has not been reported."""
        handle, self.in_flight = self.in_flight, None
        if handle is not None:
            handle.raise_unseen()

    def group_of(self, source: StateSource) -> dist.ProcessGroupGloo | None:
        """Return the connections that the ranks of ``source`` agree over, made by all of them at the first
        call.

        They are the session's own: a save in the background must not mix its messages with the training
        step's, and has to end well after ``destroy_process_group``. ``new_group`` gives neither.
        """
        if source.world_size == 1:
            return None
        if source.group is None:
            raise RuntimeError(
                f"group: expected a process group of {source.world_size} ranks, got None. Set it to the "
                "group of these ranks."
            )
        if not self._groups:
            store = source.group.get_group_store()
            # All ranks come here together, so the arrivals of one meeting are world_size counts in a row.
            session_number = (store.add(_STORE_PREFIX, 1) - 1) // source.world_size
            made = dist.ProcessGroupGloo(
                dist.PrefixStore(f"{_STORE_PREFIX}/{session_number}", store),
                source.rank,
                source.world_size,
                timedelta(seconds=source.config.timeout_seconds),
            )
            self._groups.append(made)
        return self._groups[0]


# A source knows nothing of checkpoints, and a save in flight has to be found again from the source alone.
_sessions: WeakKeyDictionary[StateSource, SaveSession] = WeakKeyDictionary()


def session_of(source: StateSource) -> SaveSession:
    """Return the session of ``source``, which lives as long as it does."""
    return _sessions.setdefault(source, SaveSession())


def save_in_progress(source: StateSource) -> SaveHandle | None:
    """Return the save of ``source`` that is under way in the background; None if there is none."""
    session = _sessions.get(source)
    handle = None if session is None else session.in_flight
    return None if handle is None or handle.done() else handle
