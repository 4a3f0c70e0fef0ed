"""The API reference: every public name is on the page, its docstring is complete, and its examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

ROOT = Path(__file__).resolve().parents[2]
PAGE = next((ROOT / "docs").rglob("api.md"))
# All names that these export are public. zero_ext.integrations.deepspeed has a page of its own, and the other
# packages are the engine's.
PACKAGES = (
    "zero_ext",
    "zero_ext.activation",
    "zero_ext.attention",
    "zero_ext.checkpoint",
    "zero_ext.config",
    "zero_ext.data",
    "zero_ext.integrations",
    "zero_ext.integrations.accelerate",
    "zero_ext.integrations.lightning",
    "zero_ext.integrations.peft",
    "zero_ext.integrations.ray",
    "zero_ext.integrations.transformers",
    "zero_ext.integrations.trl",
    "zero_ext.monitor",
    "zero_ext.optim.one_bit",
    "zero_ext.optim.schedulers",
    "zero_ext.parallel",
    "zero_ext.parallel.experts",
    "zero_ext.parallel.pipeline",
    "zero_ext.plan",
    "zero_ext.plan.simulation",
    "zero_ext.zero",
)
OWN_PAGE = "zero_ext.integrations.deepspeed"
# The look of plots and pages, which the library and its demonstrations share.
APPEARANCE = ("zero_ext.config.plot_colors", "zero_ext.cli.html_page")
# By how often the README, the documentation and the examples use them, of those that need no further package.
MOST_USED = (
    "apply_tensor_parallel",
    "checkpoint_activations",
    "CsvFile",
    "double_backward",
    "engine_of",
    "full_state_dict",
    "gathered",
    "Init",
    "initialize",
    "LayerSpec",
    "load_checkpoint",
    "make_mesh",
    "Pipeline",
    "PipelineModule",
    "prepare",
    "save_checkpoint",
    "ShardedLoader",
    "SparseSelfAttention",
    "sparsify_attention",
    "TiedLayerSpec",
)
SECTIONS = ("Args", "Attributes", "Examples", "Raises", "Returns", "Yields")
# Methods of these names have the docstring of their class.
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """Where a name is defined."""

    module: str
    name: str
    node: ast.stmt

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.name


class Documented(NamedTuple):
    """A function, method or class with its docstring, and for a constructor with that of its class."""

    label: str
    node: Function | ast.ClassDef
    docstring: str

    def section(self, title: str) -> str:
        """The text of a section without its indentation."""
        found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", self.docstring + "\n", re.MULTILINE)
        return re.sub(r"^    ", "", found[1], flags=re.MULTILINE) if found else ""

    def entries(self, title: str) -> set[str]:
        """The names that a section explains."""
        return {name.lstrip("*") for name in re.findall(r"^([\w*]+): \S", self.section(title), re.MULTILINE)}


@cache
def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def exported(module: str) -> list[str]:
    for node in tree_of(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=names):
                return list(ast.literal_eval(names))
    raise AssertionError(f"{module} has no __all__")


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that an import in `module` names."""
    if not node.level:
        return node.module or ""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def definition_of(module: str, name: str) -> Definition:
    """The definition of a name that a module has, through imports and a function that wraps another."""
    for node in tree_of(module).body:
        match node:
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                return Definition(module, name, node)
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(args=[ast.Name(id=wrapped)])) if (
                found == name
            ):
                return definition_of(module, wrapped)
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return Definition(module, name, node)
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition_of(absolute(module, node), alias.name)
    raise AssertionError(f"{module} has no {name}")


@cache
def on_the_page() -> dict[tuple[str, str], Definition]:
    paths = re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)
    found = [definition_of(*path.rpartition(".")[::2]) for path in paths]
    assert len({each.key for each in found}) == len(paths), "a name is on the page twice"
    return {each.key: each for each in found}


def documented() -> Iterator[Documented]:
    """Functions, classes and their public methods."""
    for definition in on_the_page().values():
        node = definition.node
        if isinstance(node, Function | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            yield Documented(definition.name, node, docstring)
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, Function) and not any(is_setter(one) for one in each.decorator_list):
                    label = f"{definition.name}.{each.name}"
                    if each.name in CONSTRUCTORS:
                        yield Documented(label, each, docstring)
                    elif each.name == "__call__" or not each.name.startswith("_"):
                        yield Documented(label, each, ast.get_docstring(each) or "")


def is_setter(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute) and decorator.attr == "setter"


def is_property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def functions() -> Iterator[tuple[Documented, Function]]:
    for each in documented():
        if not isinstance(each.node, ast.ClassDef):
            yield each, each.node


def test_every_public_name_is_on_the_page() -> None:
    missing = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in exported(package)
        if definition_of(package, name).key not in on_the_page()
    ]
    assert missing == []


def test_what_the_documentation_imports_is_on_the_page() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    imports = {
        (module, name.strip())
        for file in files
        for module, names in re.findall(
            r"^ *from (zero_ext[\w.]*) import \(?([\w, ]+)", file.read_text(), re.MULTILINE
        )
        for name in names.split(",")
        if name.strip() and not f"{module}.{name.strip()}".startswith((OWN_PAGE, *APPEARANCE))
    }
    assert ("zero_ext.zero", "engine_of") in imports
    missing = [each for each in sorted(imports) if definition_of(*each).key not in on_the_page()]
    assert missing == []


def test_every_docstring_begins_with_a_summary() -> None:
    """One line, an imperative one for functions."""
    verb = re.compile(r"(?!A |An |The |What |Where |Which |How |Whether |See )[A-Z][a-z]+(?<![^s]s)\b.*\.")
    noun = re.compile(r"(?!What |Where |Which |How |See )[A-Z0-9`].*\.")
    offenders = []
    for each in documented():
        summary, _, rest = each.docstring.partition("\n")
        named = isinstance(each.node, ast.ClassDef) or is_constructor(each) or is_property(each.node)
        if not (noun if named else verb).fullmatch(summary) or rest[:1] not in ("", "\n"):
            offenders.append(f"{each.label}: {summary!r}")
    assert offenders == []


def test_every_constant_is_explained() -> None:
    constants = [each for each in on_the_page().values() if isinstance(each.node, ast.Assign)]
    assert {"MACHINES", "SCHEDULES"} <= {each.name for each in constants}
    for each in constants:
        body = tree_of(each.module).body
        match body[body.index(each.node) + 1]:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
        raise AssertionError(f"{each.module}.{each.name} has no docstring below it")


def test_every_parameter_and_field_is_explained() -> None:
    offenders = []
    for each, node in functions():
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        names = {one.arg for one in named} - {"self", "cls"}
        known = each.entries("Args")
        if is_constructor(each):
            known |= each.entries("Attributes")
        offenders += [f"{each.label}: {name}" for name in sorted(names - known)]
        offenders += [f"{each.label}: no parameter {name}" for name in sorted(each.entries("Args") - names)]
    for each in documented():
        if isinstance(each.node, ast.ClassDef):
            fields = [node.target for node in each.node.body if isinstance(node, ast.AnnAssign)]
            names = {one.id for one in fields if isinstance(one, ast.Name) and not one.id.startswith("_")}
            offenders += [f"{each.label}: {name}" for name in sorted(names - each.entries("Attributes"))]
    assert offenders == []


def is_constructor(each: Documented) -> bool:
    return each.label.rpartition(".")[2] in CONSTRUCTORS


def test_every_returned_value_is_explained() -> None:
    offenders = []
    for each, node in functions():
        returned = ast.unparse(node.returns) if node.returns else "None"
        if returned == "None" or is_constructor(each) or is_property(node):
            continue
        if not (each.section("Returns") or each.section("Yields")):
            offenders.append(f"{each.label}: {returned}")
    assert offenders == []


def raised(node: Function) -> Iterator[str]:
    """Names of the exceptions that the function itself raises; "" for one that it was given or has caught."""
    waiting: list[ast.AST] = [*node.body]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            raises = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            name = ast.unparse(raises).rpartition(".")[2]
            yield name if name[0].isupper() else ""
        if not isinstance(inner, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(inner)


def test_every_exception_is_explained() -> None:
    offenders = []
    for each, node in functions():
        known = each.entries("Raises")
        for name in sorted({*raised(node)}):
            if name not in known and not (name == "" and known):
                offenders.append(f"{each.label}: {name}")
    assert offenders == []


def test_docstrings_are_markdown() -> None:
    """Without the roles and double backticks of reStructuredText, and with sections that griffe knows."""
    offenders = []
    for each in documented():
        offenders += [f"{each.label}: {role}" for role in re.findall(r":\w+:`|(?<!`)``(?!`)", each.docstring)]
        titles = re.findall(r"^(\w+):$", each.docstring, re.MULTILINE)
        offenders += [f"{each.label}: {title}" for title in titles if title not in SECTIONS]
    assert offenders == []


def modules_with(pattern: str) -> list[str]:
    """The modules that define something on the page whose docstring has `pattern`."""
    return sorted(
        {
            definition.module
            for definition in on_the_page().values()
            if isinstance(definition.node, Function | ast.ClassDef)
            and re.search(pattern, ast.get_docstring(definition.node) or "")
        }
    )


def snippets(module: str) -> list[str]:
    """The examples of a module that need four ranks."""
    found = []
    for node in tree_of(module).body:
        if isinstance(node, Function | ast.ClassDef):
            found += re.findall(r"```python\n(.*?)```", ast.get_docstring(node) or "", re.DOTALL)
    return [re.sub(r"^    ", "", each, flags=re.MULTILINE) for each in found]


def test_the_most_used_names_have_an_example() -> None:
    shown = {each.label for each in documented() if re.search(">>> |```python", each.section("Examples"))}
    assert len(set(MOST_USED)) == 20
    assert sorted(set(MOST_USED) - shown) == []


@pytest.mark.parametrize("module", modules_with(">>> "))
def test_an_example_runs(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in an empty folder, with `torch` and `zero_ext` imported."""
    names = {"torch": torch, "zero_ext": zero_ext}
    runner = doctest.DocTestRunner()
    ran = 0
    for example in doctest.DocTestFinder().find(importlib.import_module(module), globs=names):
        folder = tmp_path / example.name
        folder.mkdir()
        monkeypatch.chdir(folder)
        torch.manual_seed(0)
        printed: list[str] = []
        failed, attempted = runner.run(example, out=printed.append)
        assert not failed, "".join(printed)
        ran += attempted
    assert ran > 0


@on_ranks(4)
@pytest.mark.parametrize("module", modules_with("```python"))
def test_an_example_runs_on_four_ranks(world: World, module: str) -> None:
    found = snippets(module)
    assert found
    for snippet in found:
        exec(compile(snippet, module, "exec"), {"torch": torch, "zero_ext": zero_ext})
