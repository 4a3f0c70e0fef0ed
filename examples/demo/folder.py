"""The folder that a demonstration reports into."""

from __future__ import annotations

import shutil
from pathlib import Path


def clear(folder: Path, mark: str) -> None:
    """Removes what an earlier demonstration left; refuses a folder with anything but no file `mark`."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise SystemExit(f"{folder} holds something else than a demonstration's report; give another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
