"""Every public name of DeepSpeed that zero_ext knows: served, or refused and why. The docs come from here."""

from __future__ import annotations

from functools import cache

from zero_ext.integrations.deepspeed.registry.entry import Entry
from zero_ext.integrations.deepspeed.registry.modules import MODULES, REFUSED_MODULES
from zero_ext.integrations.deepspeed.registry.refused_table import REFUSED
from zero_ext.integrations.deepspeed.registry.served_table import SERVED
from zero_ext_deepspeed_finder import API_VERSION

TABLE: tuple[Entry, ...] = (*SERVED, *REFUSED)

__all__ = ["API_VERSION", "MODULES", "REFUSED_MODULES", "TABLE", "Entry", "find", "module_refusal"]


@cache
def _by_path() -> dict[str, Entry]:
    return {entry.path: entry for entry in TABLE}


def find(path: str) -> Entry | None:
    """The entry of a name like "deepspeed.zero.Init"; None for one that is not listed."""
    return _by_path().get(path)


def module_refusal(name: str) -> Entry | None:
    """The entry that refuses module ``name``, or a package it lies in; None if nothing does."""
    while name:
        if name in REFUSED_MODULES:
            return Entry(name, "refused", REFUSED_MODULES[name])
        name = name.rpartition(".")[0]
    return None
