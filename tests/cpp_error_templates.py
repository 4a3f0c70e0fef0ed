"""The error messages of the C++ sources as templates: ``{}`` stands for each value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.error_templates import ROOT, VALUE, ErrorText

_RAISED = re.compile(r"\b(?:(?P<check>(?:STD_)?TORCH_CHECK|(?<!void )require)|throw\s+(?P<error>[\w:]+))\(")
# They make a text of their arguments, one after another: csrc/core/base/error_text.h.
_JOINS = {"make_error", "join_text"}
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'|//[^\n]*|.', re.DOTALL)
_LITERALS = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+')
# What reads a tensor argument's name in messages: csrc/ops/checks.h.
_LABEL = f"{VALUE}: argument '{VALUE}': "
_DEEPEST = 4


def cpp_error_texts(file: Path, root: Path = ROOT) -> list[ErrorText]:
    """Return the texts of the errors that a C++ file raises."""
    source = file.read_text()
    name = str(file.relative_to(root))
    found = []
    for match in _RAISED.finditer(source):
        if "//" in source[source.rfind("\n", 0, match.start()) + 1 : match.start()]:
            continue
        arguments = _arguments(source, match.end())
        line = source.count("\n", 0, match.start()) + 1
        if match["check"]:
            text = "".join(_template(each, {}) for each in arguments[1:])
        else:
            text = _text_of(match["error"], arguments, source)
        if text:
            found.append(ErrorText(name, line, match["error"] or match["check"], text))
    return found


def _arguments(source: str, start: int) -> list[str]:
    """The arguments of the call whose parenthesis closes before ``start``."""
    found, depth = [""], 1
    for token in _tokens(source, start):
        depth += (token in "([{") - (token in ")]}")
        if depth == 0:
            break
        if token == "," and depth == 1:
            found.append("")
        else:
            found[-1] += token
    return [each.strip() for each in found]


def _tokens(source: str, start: int) -> Iterator[str]:
    for match in _TOKEN.finditer(source, start):
        if not match[0].startswith("//"):
            yield match[0]


def _text_of(error: str, arguments: list[str], source: str, depth: int = 0) -> str:
    """The text of an error, or of what the function of this file that makes the error puts around it."""
    if error == "std::runtime_error" or error in _JOINS:
        return "".join(_template(each, {}) for each in arguments)
    helper = re.search(rf"^std::runtime_error {error}\((?P<parameters>[^)]*)\) \{{", source, re.MULTILINE)
    if helper is None or depth == _DEEPEST:
        return ""
    names = [each.split()[-1] for each in helper["parameters"].split(",")]
    values = dict(zip(names, arguments, strict=True))
    returned = re.compile(r"return ([\w:]+)\(").search(source, helper.end())
    assert returned is not None
    inner = [_with(each, values) for each in _arguments(source, returned.end())]
    return _text_of(returned[1], inner, source, depth + 1)


def _with(expression: str, values: dict[str, str]) -> str:
    """``expression`` with arguments in place of the names of parameters."""
    operands = (values.get(each, each) for each in _operands(expression))
    return " + ".join(operands)


def _template(expression: str, values: dict[str, str]) -> str:
    text = ""
    for operand in _operands(_with(expression, values)):
        if _LITERALS.fullmatch(operand):
            text += "".join(ast.literal_eval(each) for each in re.findall(r'"(?:[^"\\]|\\.)*"', operand))
        elif operand.startswith("label("):
            text += _LABEL
        else:
            text += VALUE
    return text


def _operands(expression: str) -> list[str]:
    found, depth = [""], 0
    for token in _tokens(expression, 0):
        depth += (token in "([{") - (token in ")]}")
        if token == "+" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return [each.strip() for each in found]
