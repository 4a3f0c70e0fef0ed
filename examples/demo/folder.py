"""The folder that a demonstration reports into."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")
SETTINGS_FILE = "settings.json"


def clear(folder: Path, mark: str) -> None:
    """Removes what an earlier demonstration left; refuses a folder with anything but no file `mark`."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise SystemExit(f"{folder} holds something else than a demonstration's report; give another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_settings(settings: Any, folder: Path) -> None:
    """Leaves `settings`, a dataclass, in `folder` for the processes that a demonstration starts."""
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=1))


def read_settings(kind: type[Settings], folder: Path) -> Settings:
    """What `write_settings` left, of that kind."""
    return kind(**json.loads((folder / SETTINGS_FILE).read_text()))
