"""The folder that a demonstration reports into."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import Self

SETTINGS_FILE = "settings.json"


def clear(folder: Path, mark: str) -> None:
    """Removes what an earlier demonstration left; refuses a folder with anything but no file `mark`."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise SystemExit(f"{folder} holds something else than a demonstration's report; give another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


class KeptSettings:
    """Settings, a dataclass, that a demonstration leaves for the processes it starts."""

    def write(self: Any, folder: Path) -> None:
        """Leaves them in `folder`."""
        (folder / SETTINGS_FILE).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` left."""
        return cls(**json.loads((folder / SETTINGS_FILE).read_text()))
