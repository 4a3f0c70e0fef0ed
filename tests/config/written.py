"""One configuration in every form in which a program may give it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from zero_ext.config import ZeroConfig

NATIVE: dict[str, Any] = {"stage": 2, "gradient_clipping": 0.25, "precision": {"reduction": "rank_order"}}
DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "gradient_clipping": 0.25,
    "train_batch_size": "auto",
}

Write = Callable[[Path], Any]


def toml(values: Mapping[str, Any]) -> str:
    """Text of tables of one level."""
    flat = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            flat += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(flat)


def _file(values: Mapping[str, Any], suffix: str, text: Callable[[Any], str], kind: type) -> Write:
    def write(folder: Path) -> Any:
        path = folder / f"configuration{suffix}"
        path.write_text(text(values))
        return kind(path)

    return write


FORMS: dict[str, Write] = {
    "typed": lambda folder: ZeroConfig.from_mapping(NATIVE),
    "mapping": lambda folder: NATIVE,
    "another class of mapping": lambda folder: MappingProxyType(NATIVE),
    "DeepSpeed's mapping": lambda folder: DEEPSPEED,
}
for _suffix, _text in (
    (".json", json.dumps),
    (".yaml", yaml.safe_dump),
    (".yml", json.dumps),
    (".toml", toml),
):
    FORMS[f"text of a path to {_suffix}"] = _file(NATIVE, _suffix, _text, str)
    FORMS[f"DeepSpeed's {_suffix}"] = _file(DEEPSPEED, _suffix, _text, Path)


def check(config: ZeroConfig) -> None:
    """Assert that it says what the forms say."""
    assert config.stage == 2 and config.gradient_clipping == 0.25
