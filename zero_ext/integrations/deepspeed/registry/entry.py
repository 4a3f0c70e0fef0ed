"""What one public name of DeepSpeed becomes here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Fate = Literal["served", "refused"]


class Entry(NamedTuple):
    """A name or a whole module. ``note`` says what differs where it is served, else why it is not and what to
    do instead."""

    path: str
    fate: Fate
    note: str


def served(module: str, names: str, note: str = "") -> Iterator[Entry]:
    """The space-separated ``names`` of ``module``, all with one note."""
    yield from (Entry(f"{module}.{name}", "served", note) for name in names.split())


def refused(module: str, names: str, note: str) -> Iterator[Entry]:
    """The space-separated ``names`` of ``module``, refused for one reason."""
    yield from (Entry(f"{module}.{name}", "refused", note) for name in names.split())
