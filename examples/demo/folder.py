"""Set up the report folder of a demonstration and pass settings to its processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")
SETTINGS_FILE = "settings.json"


def clear(folder: Path, mark: str) -> None:
    """Empty the folder of an earlier report.

    Raises:
        SystemExit: The folder has files but no file named `mark`, so it is not a report folder.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise SystemExit(f"{folder}: expected an empty folder or an earlier report. Pass another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_settings(settings: Any, folder: Path) -> None:
    """Save the dataclass `settings` in `folder` for the processes that a demonstration starts."""
    (folder / SETTINGS_FILE).write_text(json.dumps(asdict(settings), indent=1))


def read_settings(kind: type[Settings], folder: Path) -> Settings:
    """Load the settings that `write_settings` saved, as an instance of `kind`."""
    return kind(**json.loads((folder / SETTINGS_FILE).read_text()))
