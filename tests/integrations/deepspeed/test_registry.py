"""The table of DeepSpeed's names: true of what is there, complete, and what the docs show."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.reference import api_page
from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, stand_in
from zero_ext.integrations.deepspeed.registry import MODULES, REFUSED_MODULES, TABLE, find, module_refusal

PAGE = Path(__file__).parents[3] / "docs" / "deepspeed_api.md"


def resolved(path: str) -> Any:
    """What a listed name is here."""
    module, _, name = path.rpartition(".")
    if module in ("deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"):
        engine = getattr(deepspeed, module.rpartition(".")[2])
        return getattr(engine, name, None) or engine.__annotations__.get(name)
    return getattr(importlib.import_module(MODULES[module]), name)


def test_no_name_is_listed_twice() -> None:
    paths = [entry.path for entry in TABLE]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.path)
def test_every_name_is_what_the_table_says(entry: Any) -> None:
    if entry.path == "deepspeed.DeepSpeedEngine.module":
        return  # made in the constructor of the base class
    found = resolved(entry.path)
    assert found is not None
    if entry.fate == "refused":
        assert entry.note and found is stand_in(entry)
        with pytest.raises(DeepSpeedFeatureError, match=entry.path.rpartition(".")[2]):
            found()
        with pytest.raises(DeepSpeedFeatureError):
            found.anything  # noqa: B018
        with pytest.raises(DeepSpeedFeatureError):
            type("Own", (found,), {})
        assert not isinstance(3, found)
    elif inspect.isclass(found) or inspect.isfunction(found):
        assert found.__doc__


def public_names(module: ModuleType) -> set[str]:
    listed = set(getattr(module, "__all__", ()))
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    return {name for name in listed | own if not isinstance(getattr(module, name), ModuleType)}


def test_every_public_name_is_in_the_table() -> None:
    ours = {
        "DeepSpeedFeatureError",
        "__version__",
        "_orig_torch_arange",
        "zero_wrapper_for_fp_tensor_constructor",
    }
    by_module: dict[str, list[str]] = {}
    for path, local in MODULES.items():
        by_module.setdefault(local, []).append(path)
    missing = [
        f"{local}.{name}"
        for local, paths in by_module.items()
        for name in public_names(importlib.import_module(local)) - ours
        if not any(find(f"{path}.{name}") for path in paths)
    ]
    # Imported for the modules' own use, under a name that another module's entry lists.
    assert [
        name for name in missing if name.rpartition(".")[2] not in {e.path.rpartition(".")[2] for e in TABLE}
    ] == []


def test_refused_modules() -> None:
    assert module_refusal("deepspeed.moe.layer") is not None
    assert module_refusal("deepspeed.zero") is None
    for name, note in REFUSED_MODULES.items():
        assert note and not any(served == name or served.startswith(f"{name}.") for served in MODULES), name
    with pytest.raises(DeepSpeedFeatureError, match="MixtureOfExperts"):
        deepspeed.moe.layer.MoE()
    with pytest.raises(AttributeError, match="nothing_like_this"):
        deepspeed.nothing_like_this  # noqa: B018


def test_the_docs_show_the_table() -> None:
    assert PAGE.read_text() == api_page(PAGE.read_text())
