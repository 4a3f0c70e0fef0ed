"""List the names of DeepSpeed's modules and engines, and those that other libraries take, from their sources.

`python scripts/deepspeed_names.py` rewrites zero_ext/integrations/deepspeed/names.json from the
installed packages. With `--check` it writes nothing, prints what is new and gone since, and ends with 1 if
anything is. Nothing is imported: sources are parsed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zero_ext.integrations.deepspeed.name_registry import FILE, ROOT, Names

LIBRARIES = ("accelerate", "lightning", "peft", "ray", "transformers", "trl")
# DeepSpeed's engines and their files.
ENGINES = {"DeepSpeedEngine": "runtime/engine.py", "PipelineEngine": "runtime/pipe/engine.py"}
_IGNORED = {"__all__", "__getattr__", "__doc__", "__dir__"}
# Values that JSON keeps. Longer texts are messages, not constants.
_LONGEST = 100


def sources_of(package: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package}: expected an installed package, found none. Install the pinned ones.")
    return Path(spec.origin).parent


class Module:
    """What one module of DeepSpeed binds at its top level: its own names, constants among them, and names of
    other modules of DeepSpeed, by module, as pairs of their name there and here."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.own: set[str] = set()
        self.constants: dict[str, Any] = {}
        self.reexported: dict[str, set[tuple[str, str]]] = {}
        tree = ast.parse(path.read_bytes())
        for statement in _top_level(tree.body):
            self._read(statement)
        self.own |= set(_set_by_name(tree))
        self.own -= _IGNORED

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.own.add(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            self._read_import_from(statement)
        elif isinstance(statement, ast.Import):
            for each in statement.names:
                if each.asname and each.name.startswith(f"{ROOT}."):
                    package, _, name = each.name.rpartition(".")
                    self.reexported.setdefault(package, set()).add((name, each.asname))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            self.own.update(names)
            value = statement.value
            if isinstance(value, ast.Constant) and _is_plain(value.value):
                self.constants.update((name, value.value) for name in names if name.isupper())

    def _read_import_from(self, statement: ast.ImportFrom) -> None:
        origin = statement.module or ""
        if statement.level:
            base = self._package.split(".")
            base = base[: len(base) - statement.level + 1]
            origin = ".".join([*base, *([origin] if origin else [])])
        if not _is_in_deepspeed(origin):
            return
        for each in statement.names:
            self.reexported.setdefault(origin, set()).add((each.name, each.asname or each.name))

    def listed(self) -> dict[str, Any]:
        """Return the module's entry in the file: names separated by spaces, "*" for all public ones.

        A name that differs here is written "original:local".
        """
        reexported = {
            origin: " ".join(
                sorted(original if original == local else f"{original}:{local}" for original, local in pairs)
            )
            for origin, pairs in sorted(self.reexported.items())
        }
        own = " ".join(sorted(self.own - self.constants.keys()))
        entry = {"own": own, "constants": dict(sorted(self.constants.items())), "from": reexported}
        return {kind: value for kind, value in entry.items() if value}


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST and "\n" not in value
    return value is None or isinstance(value, (bool, int, float))


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside its conditions and blocks too."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, field, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _top_level(handler.body)


def _set_by_name(tree: ast.Module) -> Iterator[str]:
    """The names that a module sets as ``globals()["name"] = value``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if ast.unparse(target.value) == "globals()" and isinstance(target.slice, ast.Constant):
                yield str(target.slice.value)


def read_deepspeed(folder: Path) -> dict[str, Any]:
    """Every module of DeepSpeed by its name, as the file lists it."""
    modules: dict[str, Module] = {}
    for path in sorted(folder.rglob("*.py")):
        names = (ROOT, *path.relative_to(folder).with_suffix("").parts)
        names = names[:-1] if names[-1] == "__init__" else names
        if all(name.isidentifier() for name in names):
            name = ".".join(names)
            modules[name] = Module(name, path)
    known = Names({"versions": {ROOT: ""}, "used": {}, "engines": {}, "modules": _listed(modules)})
    for module in modules.values():
        for origin, pairs in module.reexported.items():
            # Names that others import although the source has none of them: the module makes them.
            made = {original for original, _ in pairs if known.definition(origin, original) is None} - {"*"}
            if origin in modules:
                modules[origin].own |= made
    return _listed(modules)


def members_of(name: str, path: Path) -> str:
    """The public methods of a class, and the attributes that they set on ``self``."""
    tree = ast.parse(path.read_bytes())
    [found] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    members = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            members |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return " ".join(sorted(each for each in members if not each.startswith("_")))


def _listed(modules: dict[str, Module]) -> dict[str, Any]:
    return {name: module.listed() for name, module in sorted(modules.items())}


def used_by(folder: Path, known: Names) -> set[str]:
    """The names of DeepSpeed, each behind its module's, that the sources of a library take."""
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        if ROOT.encode() in text:
            found |= _used_in(ast.parse(text), known)
    return found


def _used_in(tree: ast.Module, known: Names) -> set[str]:
    found: set[str] = set()
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if _is_in_deepspeed(each.name):
                    bound[each.asname or ROOT] = each.name if each.asname else ROOT
                    found.add(each.name)
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_in_deepspeed(node.module):
            for each in node.names:
                bound[each.asname or each.name] = f"{node.module}.{each.name}"
    found |= set(bound.values())
    for node in ast.walk(tree):
        path = _dotted(node, bound)
        while path and known.module(path.rpartition(".")[0]) is None:  # an attribute of a class, say
            path = path.rpartition(".")[0]
        if path:
            found.add(path)
    return found


def _is_in_deepspeed(module: str | None) -> bool:
    return (module or "").partition(".")[0] == ROOT


def _dotted(node: ast.AST, bound: dict[str, str]) -> str:
    """The path that a chain of attributes names; empty unless it starts with a name of DeepSpeed."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name) or node.id not in bound:
        return ""
    return ".".join([bound[node.id], *reversed(names)])


def collected() -> dict[str, Any]:
    """What the file says of the packages that are installed."""
    versions = {name: importlib.metadata.version(name) for name in (ROOT, *LIBRARIES)}
    folder = sources_of(ROOT)
    engines = {name: members_of(name, folder / path) for name, path in ENGINES.items()}
    values: dict[str, Any] = {"versions": versions, "used": {}, "engines": engines}
    values["modules"] = read_deepspeed(folder)
    known = Names(values)
    values["used"] = {name: sorted(used_by(sources_of(name), known)) for name in LIBRARIES}
    return values


def _flat(values: dict[str, Any]) -> set[str]:
    """One line for every fact of the file."""
    lines = {f"version of {name}: {version}" for name, version in values["versions"].items()}
    lines |= {f"{library} uses {path}" for library, paths in values["used"].items() for path in paths}
    lines |= {f"{engine}.{name}" for engine, text in values["engines"].items() for name in text.split()}
    for module, entry in values["modules"].items():
        lines.add(f"module {module}")
        lines |= {f"{module}.{name}" for name in entry.get("own", "").split()}
        lines |= {f"{module}.{name} = {value!r}" for name, value in entry.get("constants", {}).items()}
        for origin, names in entry.get("from", {}).items():
            lines |= {f"{module}: {name} from {origin}" for name in names.split()}
    return lines


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is new (+) and gone (-)."""
    old, new = _flat(before), _flat(now)
    return [*(f"+ {line}" for line in sorted(new - old)), *(f"- {line}" for line in sorted(old - new))]


def unknown(values: dict[str, Any]) -> list[str]:
    """What libraries use although DeepSpeed has no such name."""
    known = Names(values)
    return [
        f"? {library} uses {path}"
        for library, paths in values["used"].items()
        for path in paths
        if known.module(path) is None and not _is_name(known, path)
    ]


def _is_name(known: Names, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    module = known.module(parent)
    return module is not None and known.definition(module, name) is not None


def main(arguments: list[str]) -> int:
    """Write the file, or compare it with what is installed."""
    now = collected()
    for line in unknown(now):
        print(line)
    if arguments != ["--check"]:
        FILE.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    found = changes(json.loads(FILE.read_text()), now)
    print("\n".join(found) or f"{FILE.name} is what the installed packages have")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
