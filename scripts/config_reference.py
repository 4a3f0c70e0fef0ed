"""Write the reference tables of all configuration keys.

`python -m scripts.config_reference docs/reference/configuration.md` rewrites the page in place."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from zero_ext.config.base_section import ConfigSection, accepted, section_type
from zero_ext.config.deepspeed.deepspeed_keys import Key
from zero_ext.config.deepspeed.translate import TABLE
from zero_ext.config.optimizer_traits import OPTIMIZERS, UNSUPPORTED_OPTIMIZERS
from zero_ext.config.training import SCHEDULERS, UNSUPPORTED_SCHEDULERS
from zero_ext.config.zero_config import ZeroConfig


def native_table() -> str:
    """Return a Markdown table of the native keys: path, accepted values, default, meaning."""
    lines = ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    lines += [_row(*row) for row in _native_rows(ZeroConfig, "")]
    return "\n".join(lines)


def deepspeed_table() -> str:
    """Return a Markdown table of DeepSpeed's keys: path, accepted values, outcome, meaning."""
    lines = ["| key | accepts | outcome | meaning or reason |", "|---|---|---|---|"]
    for key in TABLE:
        names = ", ".join(f"`{path}`" for path in (key.path, *key.aliases))
        lines.append(_row(names, key.value_type.words, key.fate, _explain(key)))
    return "\n".join(lines)


def names_table() -> str:
    """Return a Markdown table of the supported and unsupported names of optimizers and schedulers."""
    lines = ["| name | type | support |", "|---|---|---|"]
    for what, known, unsupported in (
        ("optimizer", OPTIMIZERS, UNSUPPORTED_OPTIMIZERS),
        ("scheduler", SCHEDULERS, UNSUPPORTED_SCHEDULERS),
    ):
        lines += [_row(f"`{name}`", what, "supported") for name in known]
        lines += [_row(f"`{name}`", what, f"unsupported. {why}.") for name, why in unsupported.items()]
    return "\n".join(lines)


TABLES = {"native keys": native_table, "deepspeed keys": deepspeed_table, "names": names_table}


def rewrite(text: str) -> str:
    """Return a page with its tables replaced, each between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: the markers of a table are missing.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(
                f"{name}: expected {begin!r} and after it {end!r}, once each. Add the missing one to the "
                "page."
            )
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _native_rows(model: type[ConfigSection], prefix: str) -> list[tuple[str, str, str, str]]:
    meanings = attribute_texts(model)
    rows = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = section_type(field.annotation)
        if inner is None:
            rows.append((f"`{path}`", accepted(field), _default(field), sentence(meanings[name])))
        else:
            rows += _native_rows(inner, f"{path}.")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    words = {None: "`null`", True: "`true`", False: "`false`"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"`{value}`"


def _explain(key: Key) -> str:
    sentences = [key.why]
    if key.native:
        sentences.append(f"Native key: `{key.native}`")
    if key.harmless:
        calm = ", ".join(f"`{_json(value)}`" for value in key.harmless)
        sentences.append(f"Accepted without a note: {calm}")
    if len(key.stages) < 4:
        *others, last = map(str, key.stages)
        listed = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
        sentences.append(f"It applies to {listed} only")
    if key.auto:
        sentences.append('An unresolved "auto" means the default')
    return " ".join(map(sentence, sentences))


def sentence(text: str) -> str:
    """Return a text with a capital first letter, unless it begins with a name of code, and a final period."""
    first = text.split(maxsplit=1)[0].rstrip(",.:") if text else ""
    capitalized = text[0].upper() + text[1:] if first.replace("-", "").isalpha() else text
    return capitalized if not text or text.endswith(".") else f"{capitalized}."


def _json(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value).replace("'", '"')


def attribute_texts(model: type[ConfigSection]) -> dict[str, str]:
    """Return the text of each field of a model, inherited ones included, from its "Attributes:" section."""
    found: dict[str, str] = {}
    for parent in reversed(model.__mro__):
        section = (inspect.cleandoc(parent.__doc__ or "")).partition("Attributes:\n")[2]
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
        for names, text in entries:
            found.update({name.strip(): " ".join(text.split()) for name in names.split(",")})
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(rewrite(target.read_text(encoding="utf-8")), encoding="utf-8")
