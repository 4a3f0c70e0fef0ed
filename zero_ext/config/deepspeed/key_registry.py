"""All DeepSpeed keys together, found by path."""

from __future__ import annotations

from collections.abc import Iterator

from .attention_keys import ATTENTION_KEYS
from .feature_keys import FEATURE_KEYS
from .key import Key
from .offload_keys import AIO_KEYS, OFFLOAD_KEYS
from .training_keys import TRAINING_KEYS
from .zero_keys import ZERO_KEYS

TABLE: tuple[Key, ...] = TRAINING_KEYS + ZERO_KEYS + OFFLOAD_KEYS + AIO_KEYS + ATTENTION_KEYS + FEATURE_KEYS
KEYS: dict[str, Key] = {path: key for key in TABLE for path in (key.path, *key.aliases)}


def sections() -> Iterator[str]:
    """Paths of all groups: every proper prefix of a key's path, once."""
    seen: set[str] = set()
    for path in KEYS:
        names = path.split(".")
        for depth in range(1, len(names)):
            prefix = ".".join(names[:depth])
            if prefix not in seen:
                seen.add(prefix)
                yield prefix


SECTIONS = frozenset(sections())
