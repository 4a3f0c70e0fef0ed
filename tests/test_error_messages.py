"""Error messages have one grammar: ``<what>: expected X, got Y. <Fix>.`` or ``<what>: <problem>. <Fix>.``"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.error_templates import BUG_HELPER, ROOT, ErrorText, error_texts

PACKAGE = ROOT / "zero_ext"
NOT_CONVERTED = (
    "attention",
    "checkpoint",
    "cli",
    "config",
    "integrations",
    "ops",
    "optim",
    "plan",
    "zero",
)

_SUBJECT = re.compile(r"(?P<subject>\S.{0,119}?): \S")
_MOST_WORDS_OF_A_SUBJECT = 12
# A fix may say first when it applies: "To keep the file, pass overwrite=False."
_CONDITION = r"(?:(?:To|If|For|With|Where|While|Before|After|Otherwise)\b[^.]*?, |Or )?"
_VERBS = (
    r"add|allow|ask|attach|average|build|call|change|check|choose|clone|close|combine|"
    r"compile|compute|construct|convert|copy|correct|create|declare|delete|detach|disable|"
    r"do|drop|enable|export|feed|fill|find|fix|flatten|free|give|install|keep|leave|let|limit|"
    r"list|load|look|lower|make|mark|move|name|nest|open|pad|pass|place|prepare|pull|put|"
    r"raise|read|rebuild|recompute|reduce|register|release|remove|rename|repair|repeat|"
    r"replace|report|reshape|resize|restart|return|round|run|save|scale|see|select|send|"
    r"set|shard|shorten|shrink|skip|sort|split|start|stop|store|switch|take|train|turn|unset|"
    r"update|upgrade|use|wait|widen|work|wrap|write"
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


@pytest.mark.parametrize("package", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_every_error_names_its_subject_and_a_fix(package: str) -> None:
    found = violations(PACKAGE / package)
    if package in NOT_CONVERTED:
        assert found, f"{package} follows the grammar: remove it from NOT_CONVERTED"
    else:
        assert found == []
