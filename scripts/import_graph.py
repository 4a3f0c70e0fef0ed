"""The imports between the modules of ``zero_ext``, and the layers that they may cross in one direction only.

A layer consists of subpackages of ``zero_ext``; of ``zero``, whose order matters most, of those inside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "zero_ext"

# Imports only point to earlier layers. Packages of one layer do not import one another.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("config",),
    ("ops",),
    ("comm",),
    ("offload",),
    ("optim", "attention", "activation", "data"),
    ("zero.memory",),
    ("zero.units",),
    ("zero.tiling",),
    ("zero.unshard",),
    ("zero.construction",),
    ("zero.gradients",),
    ("zero.step",),
    ("zero.engine",),
    ("zero.api",),
    ("zero",),
    ("checkpoint", "parallel"),
    ("plan", "monitor"),
    ("integrations",),
    ("cli",),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def files(root: Path = ROOT) -> list[Path]:
    """The package's Python files."""
    return sorted((root / PACKAGE).rglob("*.py"))


def module_of(file: Path, root: Path = ROOT) -> str:
    """The dotted name of a file's module."""
    names = file.relative_to(root).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def package_of(module: str) -> str | None:
    """Return the subpackage that a module is in, as LAYERS names it; None for ``zero_ext`` itself."""
    names = module.split(".")[1:]
    if not names:
        return None
    return ".".join(names[:2]) if names[0] == "zero" else names[0]


def imported_names(file: Path, root: Path = ROOT) -> set[str]:
    """Absolute names that a file imports from the package, anywhere in it, also for type checkers alone."""
    package = file.relative_to(root).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == PACKAGE}


def module_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """For each module the modules that it imports. An imported name counts as the module it is in."""
    modules = {module_of(file, root): file for file in files(root)}

    def resolved(name: str) -> str:
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {resolved(name) for name in imported_names(file, root)} - {module}
        for module, file in modules.items()
    }


def wrong_imports(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Imports that do not point to an earlier layer, and modules without a layer."""
    wrong = []
    for module, imports in sorted(graph.items()):
        own = package_of(module)
        if own is None:
            continue
        if own not in LEVEL:
            wrong.append(f"{module}: {own} is not in LAYERS")
            continue
        for other in sorted(imports):
            package = package_of(other)
            if package != own and (package is None or LEVEL.get(package, len(LAYERS)) >= LEVEL[own]):
                wrong.append(f"{module} imports {other}")
    return wrong


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules that import one another (strongly connected components, Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in graph.get(module, ()):
            if other not in index:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found
