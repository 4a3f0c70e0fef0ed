"""The settings that a sweep found best for each peer and model, as contenders use them: a file per model."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Settings = dict[str, Any]

FOLDER = Path(__file__).with_name("tuned_settings")
# Families with knobs, and the package of each. What was best in one version may not be in another.
PACKAGES = {
    "ddp": "torch",
    "fsdp2": "torch",
    "deepspeed": "deepspeed",
    "trainer_deepspeed": "deepspeed",
}
# Contenders that differ from another one only in the optimizer's rule or in the loop have its settings.
SETTINGS_OF = {
    "trainer-deepspeed2": "deepspeed2",
    "trainer-deepspeed3": "deepspeed3",
    "fsdp2-muon": "fsdp2",
    "deepspeed1-muon": "deepspeed1",
    "deepspeed2-muon": "deepspeed2",
}


def package_version(family: str) -> str:
    """Version of the package of a family of contenders, "not installed" without it."""
    try:
        return version(PACKAGES[family])
    except PackageNotFoundError:
        return "not installed"


def read(model: str, folder: Path) -> dict[str, Any]:
    """All sweeps on a model by key; none without a file."""
    file = folder / f"{model}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def record(model: str, key: str, sweep: dict[str, Any], folder: Path) -> None:
    """Replace the sweep of one contender in the file of the model."""
    found = {**read(model, folder), key: sweep}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model}.json").write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def settings_of(key: str, family: str, model: str | None) -> Settings | None:
    """The best settings of a contender on a model, empty where its defaults were best.

    None if no sweep of this model was recorded with the installed version of the peer.
    """
    sweep = read(model, FOLDER).get(SETTINGS_OF.get(key, key)) if model else None
    if sweep is None or sweep["version"] != package_version(family):
        return None
    return sweep["settings"]


def set_by_path(config: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set values of nested sections by the path of their key, "zero_optimization.overlap_comm"."""
    for path, value in settings.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
