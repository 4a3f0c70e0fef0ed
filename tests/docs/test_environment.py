"""The page on environment variables lists what the code reads, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = next((ROOT / "docs").rglob("environment.md"))
SOURCES = [
    *sorted((ROOT / "zero_ext").rglob("*.py")),
    ROOT / "setup.py",
    ROOT / "zero_ext_import_hooks.py",
]
ENVIRONMENT = "os.environ"


def is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == ENVIRONMENT


def strings_by_name(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Every string that a name stands for: module constants, and variables of loops over strings."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    found.setdefault(name, set()).add(text)
        for node in ast.walk(tree):
            match node:
                case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=elements)):
                    texts = {each.value for each in elements if isinstance(each, ast.Constant)}
                    found.setdefault(name, set()).update(text for text in texts if isinstance(text, str))
    return found


def keys_read(tree: ast.Module) -> Iterator[ast.expr]:
    """The expressions by which a module looks something up in the environment."""
    mappings = {
        argument.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
        if is_environment(default)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[key, *_]) if is_environment(
                value
            ):
                assert name in {"get", "setdefault", "pop"}, f"os.environ.{name}"
                yield key
            case ast.Subscript(value=value, slice=key, ctx=ast.Load()) if is_environment(value):
                yield key
            case ast.Compare(left=key, comparators=[value]) if is_environment(value):
                yield key
            case ast.Call(args=[ast.Name(id=name), key, *_]) if name in mappings:
                yield key


def variables(files: list[Path]) -> set[str]:
    trees = [ast.parse(file.read_text()) for file in files]
    strings = strings_by_name(trees)
    found: set[str] = set()
    for tree in trees:
        for key in keys_read(tree):
            match key:
                case ast.Constant(value=str(text)):
                    found.add(text)
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    assert name in strings, f"nothing says what {ast.unparse(key)} stands for"
                    found |= {text for text in strings[name] if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}
                case _:
                    raise AssertionError(f"a variable that is computed: {ast.unparse(key)}")
    return found


def test_the_table_lists_every_variable() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == variables(SOURCES)


def test_no_variable_is_read_by_other_means() -> None:
    offenders = [
        f"{file.relative_to(ROOT)}: {found}"
        for file in [*SOURCES, *sorted((ROOT / "csrc").rglob("*.[hc]*"))]
        for found in re.findall(r"\b(?:secure_)?getenvb?\b|\benvironb\b|from os import", file.read_text())
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "line",
    [
        "import os\nvalue = os.environ.get('NEW_ONE')",
        "import os\nvalue = os.environ['NEW_ONE']",
        "import os\nvalue = 'NEW_ONE' in os.environ",
        "import os\nNAME = 'NEW_ONE'\nvalue = os.environ.get(NAME, '')",
        "import os\nfor name in ('NEW_ONE',):\n    os.environ.get(name)",
        "import os\ndef f(environment=os.environ):\n    return number(environment, 'NEW_ONE')",
    ],
)
def test_a_new_variable_would_be_seen(line: str, tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text(line)
    assert variables([file]) == {"NEW_ONE"}
