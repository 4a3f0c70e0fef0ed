"""The tree of folders: imports point one way, folders stay small, and a name stands for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.import_graph import circles, files, module_graph, wrong_imports

ROOT = Path(__file__).resolve().parents[1]
FILES_OF_A_FOLDER = 18
FOLDERS = ("zero_ext", "tests", "benchmarks", "examples", "scripts")
# One operator keeps its word in ops/ and optim/, and DeepSpeed's modules keep theirs.
SHARED_NAMES = {"__init__.py", "adam.py", "lamb.py", "lion.py", "aio.py"}

# Words of one author for what the field has terms for. `in_place` is torch's.
PRIVATE_WORD = re.compile(
    "homes?|born|birth|birthplace|rooms?|ways?|kept|keeper|keeping|keeps|settle[ds]?|takes?|taken|took|gives?|given|"
    "gave|let|arrivals?|here|landings?|together|postponed?|tells?|told|hears?|heard|wholes?|places?|pieces?|parts?|"
    "hops?|wire|pictures?|ledger|forecast|residency|frames|signs"
)
# Names of traceback, sys and pathlib, and arguments and attributes of DeepSpeed.
FOREIGN = {"clear_frames", "_current_frames", "num_parts", "parts"}
TERMS = {"in_place", "inplace", "IN_PLACE", "InPlace", "whole_tensors"}


def test_imports_point_in_one_direction() -> None:
    graph = module_graph()
    assert len(graph) > 300
    assert wrong_imports(graph) == []


def test_no_modules_import_one_another() -> None:
    """Not even for type checkers. A package's ``__init__`` re-exports, and is not looked at."""
    packages = {module for module in module_graph() if (ROOT / module.replace(".", "/")).is_dir()}
    modules = {name: imports for name, imports in module_graph().items() if name not in packages}
    assert circles(modules) == []


def test_a_reverse_import_and_a_circle_would_be_seen(tmp_path: Path) -> None:
    package = tmp_path / "zero_ext"
    for name in ("ops/early.py", "zero/units/unit.py", "zero/api/prepare.py", "zero/memory/pool.py"):
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for each in (
            file,
            *(folder / "__init__.py" for folder in file.parents if folder.is_relative_to(package)),
        ):
            each.touch()
    early, unit = (
        tmp_path / "zero_ext" / "ops" / "early.py",
        tmp_path / "zero_ext" / "zero" / "units" / "unit.py",
    )
    for file, line in (
        (early, "import zero_ext.zero.units.unit"),
        (early, "from zero_ext.zero import units"),
        (early, "from ..zero.units import unit"),
        (unit, "from zero_ext.zero.api.prepare import prepare"),
        (unit, "from ..api import prepare"),
    ):
        file.write_text(f"def late():\n    {line}\n")
        assert len(wrong_imports(module_graph(tmp_path))) == 1, line
        file.write_text("")
    unit.with_name("flat_layout.py").touch()
    unit.write_text("from zero_ext.zero.memory import pool\nfrom . import flat_layout\n")
    assert wrong_imports(module_graph(tmp_path)) == []
    unit.with_name("flat_layout.py").write_text("from .unit import Unit\n")
    assert circles(module_graph(tmp_path)) == [
        ["zero_ext.zero.units.flat_layout", "zero_ext.zero.units.unit"]
    ]


def folders(*names: str) -> Iterator[Path]:
    for name in names:
        root = ROOT / name
        yield from (path for path in (root, *root.rglob("*")) if path.is_dir() and path.name != "__pycache__")


def test_folders_stay_small() -> None:
    counts = {
        str(folder.relative_to(ROOT)): sum(
            1 for file in folder.iterdir() if file.is_file() and file.suffix not in {".so", ".pyc"}
        )
        for folder in folders("zero_ext", "csrc")
    }
    assert counts["zero_ext/zero/units"] > 10
    assert {name: count for name, count in counts.items() if count > FILES_OF_A_FOLDER} == {}


def test_a_file_name_stands_for_one_thing() -> None:
    found = defaultdict(list)
    for file in files():
        if file.name not in SHARED_NAMES:
            found[file.name].append(str(file.relative_to(ROOT)))
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_a_class_name_stands_for_one_class() -> None:
    """Among classes without an underscore; the DeepSpeed API has DeepSpeed's names."""
    found = defaultdict(list)
    for file in files():
        if "deepspeed" in file.parts:
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(ROOT)))
    assert [(name, paths) for name, paths in found.items() if len(paths) > 1] == []


def words_of(name: str) -> set[str]:
    """``StateHome``, ``state_home`` and ``STATE_HOME`` are state and home."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of its own that a file defines or uses, with their lines."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {
        alias.asname or alias.name
        for node in imports
        if not node.level and (node.module or "").split(".")[0] not in {"zero_ext", *FOLDERS}
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.Name() if node.id not in foreign:
                yield node.id, node.lineno
            case ast.Attribute() if ast.unparse(node) != "Path.home":
                yield node.attr, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.keyword(arg=str(name)):
                yield name, node.value.lineno


def private_words(name: str) -> set[str]:
    if name in FOREIGN or any(term in name for term in TERMS):
        return set()
    return {word for word in words_of(name) if PRIVATE_WORD.fullmatch(word)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_the_fields_own_terms(folder: str) -> None:
    offenders = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT)
        offenders += [f"{path}" for each in path.parts if private_words(each)]
        offenders += [
            f"{path}:{line} {name}"
            for name, line in identifiers(ast.parse(file.read_text()))
            if private_words(name)
        ]
    assert offenders == []


CPP_TOKEN = re.compile(r'R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|[A-Za-z_]\w*', re.DOTALL)


def test_names_in_cpp_are_the_fields_own_terms() -> None:
    """Outside comments and strings."""
    offenders = []
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            names = {match[0] for match in CPP_TOKEN.finditer(file.read_text())}
            path = file.relative_to(ROOT)
            offenders += [
                f"{path} {name}" for name in sorted(names) if name.isidentifier() and private_words(name)
            ]
            offenders += [f"{path}" for each in path.parts if private_words(each)]
    assert offenders == []
