"""Sparse attention of the translation: the keys that the mode uses."""

from __future__ import annotations

from zero_ext.config.sparse_attention import MODE_KEYS, LayoutMode

from .attention_keys import SECTION
from .resolve_auto import ResolvedKeys
from .translation_note import Note


def set_sparse_attention(resolved: ResolvedKeys, native: dict[str, object], notes: list[Note]) -> None:
    """Set the native `sparse_attention` section, if any: the keys its mode uses, a note for others.

    DeepSpeed's own documentation lists the keys of all modes for one mode, so that none of them is a
    mistake.
    """
    prefix = f"{SECTION}."
    values = {
        path.removeprefix(prefix): value for path, value in resolved.values.items() if path.startswith(prefix)
    }
    if not values:
        return
    values = {name: value.lower() if isinstance(value, str) else value for name, value in values.items()}
    mode: LayoutMode = next((known for known in MODE_KEYS if known == values.get("mode")), "fixed")
    section: dict[str, object] = {"mode": mode}
    for name, value in values.items():
        if name in ("mode", "block", "attention", *MODE_KEYS[mode]):
            section[name] = value
        else:
            notes.append(Note(f"{prefix}{name}", "no effect", f"the mode is {mode}, which does not use it"))
    if mode == "bigbird" and "num_random_blocks" not in section:
        section["num_random_blocks"] = 0
        notes.append(
            Note(
                f"{prefix}num_random_blocks",
                "default",
                "not set, so 0 as in DeepSpeed's JSON. The paper uses 3",
            )
        )
    native[SECTION] = section
