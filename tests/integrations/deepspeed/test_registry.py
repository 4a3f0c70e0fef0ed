"""DeepSpeed's names: the list is what its sources have, every name is supported or raises with a reason, and
the docs show that."""

from __future__ import annotations

import copy
import importlib.util
import json
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import pytest

from scripts.deepspeed_reference import api_page, entries
from tests.integrations.launch import ROOT, printed_by
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.name_registry import DIFFERENCES, FILE, REASONS, names
from zero_ext_import_hooks import API_VERSION

PAGE = ROOT / "docs" / "reference" / "deepspeed_api.md"
ACTIVATE = "from zero_ext.integrations.deepspeed import import_alias; import_alias.activate()"
# A library asks for it inside a try, and DeepSpeed does not have it either.
NOT_IN_DEEPSPEED = "deepspeed.utils.is_initialized"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/deepspeed_names.py."""
    path = ROOT / "scripts" / "deepspeed_names.py"
    spec = importlib.util.spec_from_file_location("deepspeed_names", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_is_what_the_installed_packages_have(script: ModuleType) -> None:
    listed = json.loads(FILE.read_text())
    found = script.collected()
    assert script.changes(listed, found) == []
    assert script.unknown(found) == [f"? transformers uses {NOT_IN_DEEPSPEED}"]
    moved = copy.deepcopy(found)
    del moved["modules"]["deepspeed.runtime.utils"]
    moved["modules"]["deepspeed.constants"]["own"] = "brand_new"
    moved["used"]["peft"].append("deepspeed.utils.brand_new")
    changes = script.changes(found, moved)
    assert "- deepspeed.runtime.utils.partition_uniform" in changes
    assert {"+ deepspeed.constants.brand_new", "+ peft uses deepspeed.utils.brand_new"} <= set(changes)
    assert "? peft uses deepspeed.utils.brand_new" in script.unknown(moved)


def test_versions_agree() -> None:
    assert deepspeed.__version__ == names().version == API_VERSION


EVERY_NAME = (
    ACTIVATE
    + """
import importlib, json
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.name_registry import names

USES = (lambda it: it(), lambda it: it.anything, lambda it: type("Own", (it,), {}), lambda it: it["key"],
        lambda it: list(it), lambda it: "key" in it, lambda it: bool(it), lambda it: it.__call__)

def wrong(path, found):
    if type(found).__name__ != "_Refused":
        return None
    for number, use in enumerate(USES[:-1]):
        try:
            use(found)
            return f"{path}: use {number} went through"
        except DeepSpeedFeatureError as error:
            name = path.rpartition(".")[2]
            if f".{name}: this feature of DeepSpeed is not served by zero_ext: " not in str(error):
                return f"{path}: {error}"
    return f"{path}: isinstance" if isinstance(3, found) else None

problems, refused, served = [], 0, 0
for name in names().modules:
    module = importlib.import_module(name)
    if importlib.import_module(name) is not module or module.__spec__ is None:
        problems.append(f"{name}: not the same module twice")
    for each in names().all_of(name):
        space = {}
        try:
            exec(f"from {name} import {each} as found", space)
        except Exception as error:
            problems.append(f"{name}.{each}: {error!r}")
            continue
        is_refused = type(space["found"]).__name__ == "_Refused"
        refused, served = refused + is_refused, served + (not is_refused)
        problem = wrong(f"{name}.{each}", space["found"])
        problems += [problem] if problem else []
for library, paths in names().used.items():
    for path in paths:
        module, _, each = path.rpartition(".")
        try:
            exec(f"from {module} import {each}" if module else f"import {each}")
        except Exception as error:
            problems.append(f"{library} uses {path}: {error!r}")
star = {}
exec("from deepspeed.runtime.constants import *", star)
print(json.dumps({"problems": problems, "counts": [refused, served], "star": star["TRAIN_BATCH_SIZE"]}))
"""
)


def test_every_name_can_be_imported_and_works_or_says_why_not() -> None:
    found = printed_by(EVERY_NAME)
    ours = f"from {NOT_IN_DEEPSPEED.rpartition('.')[0]}"
    assert [problem for problem in found["problems"] if NOT_IN_DEEPSPEED not in problem] == [], ours
    assert len(found["problems"]) == 1
    listed = [each for module in names().modules for each in names().all_of(module)]
    assert sum(found["counts"]) == len(listed)
    assert min(found["counts"]) > 1000 and found["star"] == "train_batch_size"


def test_names_return_what_they_return_in_deepspeed() -> None:
    constants = {name: sorted(names().constants(name)) for name in names().modules if "constants" in name}
    used = [path for paths in names().used.values() for path in paths if "." in path]
    arguments = json.dumps({"constants": constants, "used": used})
    code = (ROOT / "tests/integrations/deepspeed/scripts/names.py").read_text()
    code = code.replace("from __future__ import annotations", "")
    theirs, ours = printed_by(code, arguments), printed_by(f"{ACTIVATE}\n{code}", arguments)
    assert sum(map(len, theirs["constants"].values())) > 300
    assert theirs["used"].count(False) == 1
    for topic, values in theirs.items():
        found, wanted = flat(ours[topic]), flat(values)
        assert found.keys() == wanted.keys(), topic
        for path, value in wanted.items():
            same = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            assert found[path] == same, (topic, path)


def flat(value: Any) -> dict[str, Any]:
    """The numbers and texts of nested lists and dictionaries by their path."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, each in inner:
        nested = isinstance(each, (dict, list))
        found |= {f"{key}.{path}": leaf for path, leaf in flat(each).items()} if nested else {str(key): each}
    return found


def test_names_that_are_missing() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        deepspeed.nothing_like_this  # noqa: B018
    with pytest.raises(DeepSpeedFeatureError, match="MixtureOfExperts"):
        deepspeed.moe.layer.MoE()
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        except deepspeed.utils.exceptions.DeprecatedException:
            pytest.fail("no error is one that is not supported")


def test_every_note_is_of_a_name() -> None:
    listed = entries()
    for notes, paths in (
        (DIFFERENCES, [entry.path for entry in listed if entry.is_served]),
        (REASONS, [entry.definition.path for entry in listed if not entry.is_served]),
    ):
        used = {next((key for key in notes if fnmatchcase(path, key)), None) for path in paths}
        assert set(notes) - used == set()


def test_what_is_served_says_what_it_is() -> None:
    served = [entry for entry in entries() if entry.is_served]
    assert len(served) > 200
    for entry in served:
        found = deepspeed
        for attribute in entry.path.split(".")[1:]:
            found = getattr(found, attribute, None) or getattr(found, "__annotations__", {}).get(attribute)
        if callable(found) and not isinstance(found, str):
            assert found.__doc__, entry.path


def test_the_docs_show_the_names() -> None:
    assert PAGE.read_text() == api_page(PAGE.read_text())
