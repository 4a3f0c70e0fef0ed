"""Small faults in sources, one at a time: an operator, a constant, a condition or a call that is left out.

Python's come from the syntax tree, outside annotations and error messages. C++'s come from operators in code,
outside comments, strings, preprocessor lines and static assertions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
}
_CPP_OPERATORS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " / ": " * ",
    " % ": " / ",
    " << ": " >> ",
    " >> ": " << ",
    " += ": " -= ",
    " -= ": " += ",
}
_CPP_TOKEN = re.compile("|".join(map(re.escape, sorted(_CPP_OPERATORS, key=len, reverse=True))))
_CPP_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
_CPP_LEFT_OUT = ("#", "static_assert", "template", "using ", "assert(", "STD_TORCH_CHECK")


@dataclass(frozen=True, order=True)
class Mutant:
    """``before`` at the characters from ``start`` of a file, to be replaced by ``after``."""

    path: str
    start: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Return the faulty source. ValueError where ``before`` is not there."""
        end = self.start + len(self.before)
        if source[self.start : end] != self.before:
            raise ValueError(
                f"{self.path}: expected {self.before!r} at {self.start}. Draw the mutants again."
            )
        return source[: self.start] + self.after + source[end:]

    def described(self, source: str) -> str:
        """Return the place and the line before and after in words."""
        number = source.count("\n", 0, self.start)
        lines = (text.splitlines()[number].strip() for text in (source, self.applied(source)))
        return f"{self.path}:{number + 1}: {' => '.join(lines)}"


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Return every mutant of a Python or C++ source, in the order of the text."""
    source = path.read_text()
    found = _python(source) if path.suffix == ".py" else _cpp(source)
    return sorted({Mutant(str(path.relative_to(root)), *one) for one in found})


def _cpp(source: str) -> Iterator[tuple[int, str, str]]:
    code = _CPP_NO_CODE.sub(lambda match: " " * len(match[0]), source)
    for match in _CPP_TOKEN.finditer(code):
        begin = code.rfind("\n", 0, match.start()) + 1
        line = code[begin : code.find("\n", match.end())].strip()
        if not line.startswith(_CPP_LEFT_OUT):
            yield match.start(), match[0], _CPP_OPERATORS[match[0]]


def _python(source: str) -> Iterator[tuple[int, str, str]]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr, words: tuple[str, str]) -> Iterator[tuple[int, str, str]]:
        gap = source[span(left)[1] : span(right)[0]]
        where = re.search(rf"(?<![\w=<>!*/]){re.escape(words[0])}(?![\w=<>*/])", gap)
        if where is not None:
            yield span(left)[1] + where.start(), *words

    for node in _runs(ast.parse(source)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
                yield from between(left, right, _COMPARED[type(operator)])
            case ast.BinOp(left, operation, right) if type(operation) in _COMPUTED:
                yield from between(left, right, _COMPUTED[type(operation)])
            case ast.BoolOp(operation, [first, second, *_]):
                words = ("and", "or") if isinstance(operation, ast.And) else ("or", "and")
                yield from between(first, second, words)
            case ast.UnaryOp(ast.Not(), operand):
                start = span(node)[0]
                yield start, source[start : span(operand)[0]], ""
            case ast.Constant(bool() as value):
                yield span(node)[0], str(value), str(not value)
            case ast.Constant(int() as value):
                start, end = span(node)
                yield start, source[start:end], str(value + 1)
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                start, end = span(test)
                yield start, source[start:end], f"not ({source[start:end]})"
            case ast.Expr(ast.Call()):
                start, end = span(node)
                yield start, source[start:end], "pass"


def _runs(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that training runs: no annotations, messages of errors, or ``__all__``."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, ast.Raise | ast.JoinedStr)
                and not typing_only
            ):
                yield from _runs(child)
