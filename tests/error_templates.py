"""The error messages of the package as templates, read off its source: ``{}`` stands for each value."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUE = "{}"
BUG_HELPER = "zero_ext_bug"
# `Problem(path, text)` reads as "path: text", and `resolved.add_problem(path, text)` makes one.
PATH_AND_TEXT = {"Problem", "KeyProblem", "add_problem"}
# Their text is a reason, which the error that names the file completes.
REASONS = {"UnfitContent"}
# They end a loop or the process, or their text is Python's own protocol.
CONTROL_FLOW = {"StopIteration", "StopAsyncIteration", "SystemExit", "KeyboardInterrupt", "Exit", "Abort"}
_MOST_TEMPLATES = 64
_DEEPEST = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ErrorText:
    """One text that one call of an exception class can have."""

    file: str
    line: int
    error: str
    template: str


@dataclass
class _Scope:
    """The module and function that an expression is in, and what the function's arguments stand for."""

    module: ast.Module
    function: Function | None = None
    arguments: Mapping[str, list[str]] = field(default_factory=dict)
    depth: int = 0


def error_texts(file: Path, root: Path = ROOT) -> list[ErrorText]:
    """Return the texts of a module's errors, of those it raises and of those its functions return."""
    module = ast.parse(file.read_text())
    name = str(file.relative_to(root))
    found = []
    for function, call in _error_calls(module, None):
        error = _called(call)
        if error in CONTROL_FLOW | REASONS or _is_protocol(function, call):
            continue
        scope = _Scope(module, function)
        found += [ErrorText(name, call.lineno, error, text) for text in _texts_of(call, scope) if text]
    return found


def _error_calls(
    node: ast.AST, function: Function | None, error: str = ""
) -> Iterator[tuple[Function | None, ast.Call]]:
    """Calls that build an error, each with the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, Function) else function
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            yield inner, child.exc
            nested = [*child.exc.args, *(keyword.value for keyword in child.exc.keywords)]
            for argument in nested:
                yield from _error_calls(ast.Expr(argument), inner)
            continue
        if isinstance(child, ast.Call) and _builds_an_error(_called(child)):
            yield inner, child
        yield from _error_calls(child, inner)


def _builds_an_error(name: str) -> bool:
    return name in PATH_AND_TEXT or (name.endswith(("Error", "Exception", "Problem")) and name[0].isupper())


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_protocol(function: Function | None, call: ast.Call) -> bool:
    """Whether an error answers Python itself: a name that is not there, a key that is the whole text."""
    name = _called(call)
    if name == "AttributeError":
        return True
    return name in {"KeyError", "IndexError"} and not any(
        isinstance(each, ast.Constant | ast.JoinedStr) for each in call.args
    )


def _texts_of(call: ast.Call, scope: _Scope) -> list[str]:
    """Templates of the text of one call that builds an error."""
    name = _called(call)
    if name in PATH_AND_TEXT:
        paths, texts = (_evaluated(each, scope) for each in call.args[:2])
        return [f"{path or VALUE}: {text}" for path, text in itertools.product(paths, texts)]
    if name[:1].isupper() or name == BUG_HELPER:
        first = call.args[0] if call.args else next((each.value for each in call.keywords), None)
        return _evaluated(first, scope) if first is not None and not _nested(first) else []
    helper = _function(call, scope)
    return [] if helper is None else _returned(helper, call, scope, errors=True)


def _nested(value: ast.expr) -> bool:
    """Whether an error is built from others, which have the texts."""
    if isinstance(value, ast.List | ast.Tuple | ast.ListComp | ast.GeneratorExp):
        return True
    if isinstance(value, ast.Attribute) and value.attr == "problems":
        return True
    return isinstance(value, ast.Call) and _builds_an_error(_called(value))


def _evaluated(node: ast.expr, scope: _Scope) -> list[str]:
    """The texts that an expression can have, as far as the module shows them."""
    found = [VALUE]
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        found = [] if node.value is None else [node.value]
    elif isinstance(node, ast.JoinedStr):
        found = _joined([_evaluated(each, scope) for each in node.values])
    elif isinstance(node, ast.FormattedValue):
        found = [VALUE] if node.conversion != -1 else _evaluated(node.value, scope)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _joined([_evaluated(each, scope) for each in (node.left, node.right)])
    elif isinstance(node, ast.IfExp):
        found = [*_evaluated(node.body, scope), *_evaluated(node.orelse, scope)]
    elif isinstance(node, ast.Name):
        found = _named(node.id, scope)
    elif isinstance(node, ast.Call):
        helper = _function(node, scope)
        found = [VALUE] if helper is None else _returned(helper, node, scope)
    return list(dict.fromkeys(found))[:_MOST_TEMPLATES]


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(each) for each in itertools.islice(itertools.product(*parts), _MOST_TEMPLATES)]


def _named(name: str, scope: _Scope) -> list[str]:
    """The texts of an argument, of a local variable or of a constant of the module."""
    if name in scope.arguments:
        return scope.arguments[name]
    if scope.depth >= _DEEPEST:
        return [VALUE]
    deeper = _Scope(scope.module, scope.function, scope.arguments, scope.depth + 1)
    if scope.function is not None:
        assigned = _assigned(name, ast.walk(scope.function))
        if assigned:
            return [text for value in assigned for text in _evaluated(value, deeper)]
        if name in {argument.arg for argument in _parameters(scope.function)}:
            return [VALUE]
    at_top = _assigned(name, scope.module.body)
    return [text for value in at_top for text in _evaluated(value, deeper)] or [VALUE]


def _assigned(name: str, nodes: Iterator[ast.AST] | list[ast.stmt]) -> list[ast.expr]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if node.value is not None and any(isinstance(each, ast.Name) and each.id == name for each in targets):
            found.append(node.value)
    return found


def _parameters(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _function(call: ast.Call, scope: _Scope) -> Function | None:
    """The function or method of this module that a call runs, where its name says so."""
    if scope.depth >= _DEEPEST:
        return None
    name = _called(call)
    if isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Name):
            return None
        if call.func.value.id not in {"self", "cls", "keys"}:
            return None
    found = [each for each in ast.walk(scope.module) if isinstance(each, Function) and each.name == name]
    return found[0] if len(found) == 1 else None


def _returned(helper: Function, call: ast.Call, scope: _Scope, errors: bool = False) -> list[str]:
    """The texts that a helper returns, or those of the errors it returns, with a call's texts in them."""
    names = [argument.arg for argument in _parameters(helper) if argument.arg not in {"self", "cls"}]
    bound = {name: _evaluated(value, scope) for name, value in zip(names, call.args, strict=False)}
    bound.update({each.arg: _evaluated(each.value, scope) for each in call.keywords if each.arg})
    inside = _Scope(scope.module, helper, bound, scope.depth + 1)
    values = [
        each.value for each in ast.walk(helper) if isinstance(each, ast.Return) and each.value is not None
    ]
    if errors:
        return [text for each in values if isinstance(each, ast.Call) for text in _error_text(each, inside)]
    return [text for each in values for text in _evaluated(each, inside)] or [VALUE]


def _error_text(call: ast.Call, scope: _Scope) -> list[str]:
    """Templates of the error that a helper returns, or of the problem in it: ``ConfigError(Problem())``."""
    inner = call.args[0] if call.args else None
    if isinstance(inner, ast.Call) and _builds_an_error(_called(inner)):
        return _texts_of(inner, scope)
    return _texts_of(call, scope)
