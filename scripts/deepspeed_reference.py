"""Write the tables of DeepSpeed's supported and unsupported names.

`python scripts/deepspeed_reference.py docs/reference/deepspeed_api.md` rewrites the tables of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.config_reference import sentence
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.import_alias import served
from zero_ext.integrations.deepspeed.name_registry import Definition, difference_of, names, reason_of

_BEGIN, _END = "<!-- begin names -->", "<!-- end names -->"


class Entry(NamedTuple):
    """A public name under its shortest path.

    ``note`` is the difference of a supported name, or the reason and the alternative for an unsupported one.
    """

    path: str
    definition: Definition
    is_served: bool
    note: str


def api_page(text: str) -> str:
    """Return a page with the text between its markers replaced by the tables.

    Raises:
        ValueError: the page has no markers.
    """
    begin, end = text.find(_BEGIN), text.find(_END)
    if begin < 0 or end < begin:
        raise ValueError(f"the page needs the lines {_BEGIN} and {_END}")
    return f"{text[:begin]}{_BEGIN}\n{_tables()}\n{text[end:]}"


def entries() -> list[Entry]:
    """Return all public names of DeepSpeed except for constants, and the members of the engines."""
    known = names()
    packages = {module.rpartition(".")[0] for module in known.modules}
    found: dict[tuple[str, int], Entry] = {}
    for module in known.modules:
        short = known.short_modules.get(module, module)
        for name in known.all_of(module):
            definition = known.definition(module, name)
            if (
                definition is None
                or not definition.name
                or name.startswith("_")
                or known.is_constant(definition)
            ):
                continue
            # A name that a module imports for its own use is public where it is defined, or in a package.
            if module in packages or not known.own(module) or module == definition.module:
                supported, path = served(definition), f"{short}.{name}"
                note = sentence(reason_of(definition.path) if supported is None else difference_of(path))
                entry = Entry(path, definition, supported is not None, note)
                key = (name, id(definition.module) if supported is None else id(supported))
                found[key] = min(entry, found.get(key, entry), key=_length)
    listed = sorted(found.values(), key=lambda entry: entry.path.rpartition("."))
    return [*listed, *_members("DeepSpeedEngine"), *_members("PipelineEngine")]


def _length(entry: Entry) -> tuple[int, str]:
    return entry.path.count("."), entry.path


def _members(engine: str) -> Iterator[Entry]:
    kind = getattr(deepspeed, engine)
    defined = vars(kind).keys() | kind.__annotations__.keys()
    for base in kind.__bases__:
        if base.__module__.startswith(deepspeed.__name__) and base is not deepspeed.DeepSpeedEngine:
            defined |= vars(base).keys()
    for name in sorted(each for each in defined if not each.startswith("_")):
        path = f"deepspeed.{engine}.{name}"
        yield Entry(path, Definition(f"deepspeed.{engine}", name), True, sentence(difference_of(path)))
    for name in sorted(
        set(names().engines[engine].split()) - defined - vars(deepspeed.DeepSpeedEngine).keys()
    ):
        path = f"deepspeed.{engine}.{name}"
        if names().member(name) == path and not hasattr(kind, name):
            yield Entry(path, Definition(f"deepspeed.{engine}", name), False, sentence(reason_of(path)))


def _tables() -> str:
    listed = entries()
    there = [entry for entry in listed if entry.is_served]
    partly = {entry.definition.module for entry in there}
    missing = [e for e in listed if not e.is_served and e.definition.module in partly]
    unsupported: dict[str, set[str]] = {}
    for module in names().modules:
        if not any(f"{other}.".startswith(f"{module}.") for other in partly):
            unsupported.setdefault(sentence(reason_of(module)), set()).add(".".join(module.split(".")[:4]))
    return "\n".join(
        [
            f"\n## Supported: {len(there)} names\n",
            *_table(there, "difference"),
            f"\n## Not supported: {len(missing)} names of supported modules\n",
            *_table(missing, "reason and alternative"),
            "\n## Not supported: modules with all their names\n",
            "| modules | reason and alternative |",
            "|---|---|",
            *(
                f"| {_outermost(modules - partly)} | {note} |"
                for note, modules in sorted(unsupported.items())
            ),
            "",
        ]
    )


def _outermost(modules: set[str]) -> str:
    """Return a list of the modules without those that are inside another one."""
    found = (f"`{module}`" for module in sorted(modules) if module.rpartition(".")[0] not in modules)
    return ", ".join(found)


def _table(listed: list[Entry], title: str) -> list[str]:
    """Return a table with one row for all names of a module that share a note."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in listed:
        module, _, name = entry.path.rpartition(".")
        rows.setdefault((module, entry.note), []).append(f"`{name}`")
    head = [f"| in | names | {title} |", "|---|---|---|"]
    return head + [f"| `{module}` | {', '.join(found)} | {note} |" for (module, note), found in rows.items()]


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(api_page(page.read_text()))
