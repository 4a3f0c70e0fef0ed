"""The table of DeepSpeed's names in the docs, written from the registry.

`python -m zero_ext.integrations.deepspeed.reference docs/deepspeed_api.md` rewrites the tables inside that
file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zero_ext.integrations.deepspeed.registry import REFUSED_MODULES, TABLE, Entry

_BEGIN, _END = "<!-- begin names -->", "<!-- end names -->"


def api_page(text: str) -> str:
    """``text`` with what stands between the markers replaced by the tables. ``ValueError`` without
    markers."""
    begin, end = text.find(_BEGIN), text.find(_END)
    if begin < 0 or end < begin:
        raise ValueError(f"the page needs the lines {_BEGIN} and {_END}")
    return f"{text[:begin]}{_BEGIN}\n{_tables()}\n{text[end:]}"


def _tables() -> str:
    parts: list[str] = []
    for fate, title in (("served", "Served"), ("refused", "Refused")):
        entries = [entry for entry in TABLE if entry.fate == fate]
        parts += [
            f"\n## {title}: {len(entries)} names\n",
            *_table(entries, "difference" if fate == "served" else "why, and what instead"),
        ]
    parts += [
        f"\n## Refused: {len(REFUSED_MODULES)} modules\n",
        "| module | why, and what instead |",
        "|---|---|",
    ]
    parts += [f"| `{name}` | {note} |" for name, note in REFUSED_MODULES.items()]
    return "\n".join(parts) + "\n"


def _table(entries: list[Entry], title: str) -> list[str]:
    """A row for all names of a module that share a note."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        module, _, name = entry.path.rpartition(".")
        rows.setdefault((module, entry.note), []).append(f"`{name}`")
    head = [f"| in | names | {title} |", "|---|---|---|"]
    return head + [f"| `{module}` | {', '.join(names)} | {note} |" for (module, note), names in rows.items()]


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(api_page(page.read_text()))
