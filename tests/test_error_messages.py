"""Error messages have one grammar: ``<what>: expected X, got Y. <Fix>.`` or ``<what>: <problem>. <Fix>.``"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cpp_error_templates import cpp_error_texts
from tests.error_templates import BUG_HELPER, ROOT, ErrorText, error_texts
from zero_ext.config.internal_error import zero_ext_bug

PACKAGE = ROOT / "zero_ext"
CPP = ROOT / "csrc"
# Why a kind of I/O is not available: `IoEngine::make` and the fallback of cuFile complete these texts.
CPP_REASONS = CPP / "core/aio/queues"

_SUBJECT = re.compile(r"(?P<subject>\S.{0,119}?): \S")
_MOST_WORDS_OF_A_SUBJECT = 12
# A fix may say first when it applies: "To keep the file, pass overwrite=False."
_CONDITION = r"(?:(?:To|If|For|With|Where|While|Before|After|Otherwise)\b[^.]*?, |Or )?"
_VERBS = (
    r"add|allocate|allow|ask|assign|attach|average|begin|build|call|capture|change|check|"
    r"choose|clip|clone|close|combine|compile|compute|construct|convert|copy|correct|"
    r"create|cut|declare|delete|detach|disable|do|download|drop|enable|export|feed|fill|"
    r"find|fix|flatten|free|give|import|install|keep|leave|let|limit|list|load|look|"
    r"lower|make|mark|move|name|nest|open|pad|pass|pickle|place|prepare|pull|put|"
    r"quantize|raise|read|rebuild|recompute|reduce|register|release|remove|rename|repair|"
    r"repeat|replace|report|rescale|reserve|reshape|resize|restart|resume|return|round|run|"
    r"save|scale|see|select|send|set|shard|share|shorten|shrink|skip|sort|split|start|"
    r"stop|store|switch|take|trace|train|turn|unset|update|upgrade|use|wait|widen|work|"
    r"wrap|write"
)
_IMPERATIVE = re.compile(rf"{_CONDITION}(?:please |do not |never )?(?:{_VERBS})\b", re.IGNORECASE)
_QUESTION = re.compile(r"Did you mean .*\?$")


def complaint(text: ErrorText) -> str | None:
    """Return what an error's text lacks, or None."""
    template = text.template
    if text.error == BUG_HELPER:
        return "ends with a period, which the helper adds" if template.endswith(".") else None
    if text.error == "AssertionError" and not template.startswith("zero_ext bug: "):
        return f"an internal error that is not raised by {BUG_HELPER}"
    if text.error == "AssertionError":
        return None
    if re.fullmatch(r"(\S+: )?\{\}", template):
        return None  # its text comes from another module or from the error that it stands for
    match = _SUBJECT.match(template)
    if match is None:
        return "no subject and colon at the start"
    subject = match["subject"]
    if ". " in subject or "; " in subject or len(subject.split()) > _MOST_WORDS_OF_A_SUBJECT:
        return f"a subject that is a sentence: {subject!r}"
    if re.search(r"\bwanted\b|; ", template):
        return "a semicolon or `wanted` in place of `expected X, got Y`"
    if re.search(r"\bgot\b.*\bexpected\b", template.partition(". ")[0]):
        return "`got` before `expected`"
    if not (template.endswith((".", "{}")) or _QUESTION.search(template)):
        return "no period at the end"
    sentences = re.split(r"(?:(?<=[.?])\s|\n)(?=[A-Z{`])|(?<=\}) (?=[A-Z][a-z])", template[match.end() - 1 :])
    if not any(_is_fix(each) for each in sentences[1:]):
        return "no sentence that says how to fix it"
    return None


def _is_fix(sentence: str) -> bool:
    return bool(_IMPERATIVE.match(sentence) or _QUESTION.match(sentence) or sentence in {"{}", "{}."})


def violations(package: Path) -> list[str]:
    texts = [text for file in sorted(package.rglob("*.py")) for text in error_texts(file)]
    found = [(text, complaint(text)) for text in texts]
    return [f"{text.file}:{text.line}: {text.error}: {said}: {text.template}" for text, said in found if said]


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_error_names_its_subject_and_a_fix(package: str) -> None:
    assert violations(PACKAGE / package) == []


def test_every_error_of_the_kernels_names_its_subject_and_a_fix() -> None:
    files = [each for each in sorted(CPP.rglob("*")) if each.suffix in {".cpp", ".cu", ".cuh", ".h"}]
    texts = [
        text
        for file in files
        if not {CPP / "tests", CPP_REASONS} & set(file.parents)
        for text in cpp_error_texts(file)
    ]
    assert len(texts) > 150
    assert [f"{text.file}:{text.line}: {said}" for text in texts if (said := complaint(text))] == []


CPP_FILE = """
std::runtime_error failure(const std::string& path, const std::string& reason) {
  return std::runtime_error("store: '" + path + "': " + reason);
}

void check(std::int64_t n, const Tensor& t) {
  STD_TORCH_CHECK(f(n, 2) > 0, label({op, "t"}), "expected ", "1, got ", g(n), ". "
                  "Pass it.");  // throw std::runtime_error("not code")
  throw failure(name(n, 1), std::to_string(n) + " is too many. Pass less.");
}
"""


def test_errors_of_cpp_files_are_found(tmp_path: Path) -> None:
    file = tmp_path / "check.cpp"
    file.write_text(CPP_FILE)
    assert [(text.line, text.template) for text in cpp_error_texts(file, tmp_path)] == [
        (7, "{}: argument '{}': expected 1, got {}. Pass it."),
        (9, "store: '{}': {} is too many. Pass less."),
    ]


MODULE = """
_FIX = "Set it to 1."

class Reader:
    def check(self, n):
        if n < 0:
            raise ValueError({raised})

    def _few(self, n):
        return f"n: expected at least 1, got {{n}}. " + _FIX

    def refuse(self, key, text):
        return ConfigError(Problem(key, text))
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ('f"n: expected at least 1, got {n}. Raise it."', None),
        ('f"n: expected at least 1, got {n}. To get 1, leave it out."', None),
        ('f"{n}: no such key. Did you mean m?"', None),
        ("self._few(n)", None),
        ("str(n)", None),
        ('f"{n} is wrong"', "no subject and colon"),
        ('f"n is wrong. Look there: {n}."', "a subject that is a sentence"),
        ('f"n: {n} given, at least 1 wanted. Raise it."', "`wanted`"),
        ('f"n: got {n}, expected 1. Raise it."', "`got` before `expected`"),
        ('f"n: expected 1, got {n}; raise it."', "a semicolon"),
        ('f"n: expected 1, got {n}. Raise it"', "no period"),
        ('f"n: expected 1, got {n}. That is too few."', "no sentence that says how to fix it"),
        ('"n: expected 1. " + ("Raise it." if n else "Bad.")', "no sentence that says how to fix it"),
    ],
)
def test_what_an_error_lacks_is_found(raised: str, said: str | None, tmp_path: Path) -> None:
    file = tmp_path / "zero_ext" / "reader.py"
    file.parent.mkdir()
    file.write_text(MODULE.format(raised=raised))
    found = [complaint(text) for text in error_texts(file, tmp_path) if text.error == "ValueError"]
    assert len(found) == (2 if " if " in raised else 1)
    assert found[-1] is None if said is None else said in str(found[-1])


def test_texts_of_helpers_are_found(tmp_path: Path) -> None:
    file = tmp_path / "zero_ext" / "reader.py"
    file.parent.mkdir()
    raised = 'x)\n        raise self.refuse("key", f"bad {n}"'
    file.write_text(MODULE.format(raised=raised))
    assert "key: bad {}" in [text.template for text in error_texts(file, tmp_path)]


def test_a_broken_invariant_names_itself_as_a_bug() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    tracker = re.search(r'^(?:issues|"?bug tracker"?) *= *"(.+)"', project, re.MULTILINE | re.IGNORECASE)
    there = f" at {tracker[1]}" if tracker else ""
    text = str(zero_ext_bug("3 slices of 2"))
    assert text == f"zero_ext bug: 3 slices of 2. Please report it with the traceback{there}."
