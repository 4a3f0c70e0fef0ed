"""Another process of this user that builds a module: forked, so that it need not import torch again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


class Builder:
    """Runs `build` in a process of its own, with what it prints in files of `folder`."""

    def __init__(self, folder: Path, build: Callable[[], ModuleType]) -> None:
        self._said = folder / f"said-{len(list(folder.glob('said-*')))}.txt"
        self._said.touch()
        self._loaded = self._said.with_suffix(".path")
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(build,))
        self._process.start()

    def _run(self, build: Callable[[], ModuleType]) -> None:
        with self._said.open("w") as sys.stderr:
            try:
                module = build()
                self._loaded.write_text(f"{module.__name__} {module.__file__}")
            except RuntimeError:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)

    def wait_for(self, note: Path) -> None:
        """Returns once there is something in the file `note`; fails where the process has ended before."""
        while not note.read_text():
            assert self._process.is_alive(), self._said.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def end(self) -> tuple[int | None, str]:
        """Its exit status and what it said on stderr, once it has ended."""
        self._process.join()
        return self._process.exitcode, self._said.read_text()

    def loaded(self) -> tuple[str, Path]:
        """Name and file of the module that it built or found, and imported."""
        name, path = self._loaded.read_text().split()
        return name, Path(path)
