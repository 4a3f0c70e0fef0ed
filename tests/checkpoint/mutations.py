"""Damage to files: of their bytes, and of the JSON in them, random or as asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_ext.checkpoint.format.manifest import checksum

NUMBERS = [0, 1, 2, 7, 255, 4096, 1 << 31, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 1 << 200]
TEXTS = [
    "",
    "a",
    "$tensor",
    "../up",
    "/etc/passwd",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "x" * 50_000,
    "float32",
    "I64",
]


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Changes a bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def flip_in_master(step: Path) -> None:
    """Changes a bit of the first master weights of a checkpoint of one rank."""
    slices = json.loads((step / "manifest.json").read_text())["slices"]
    record = next(record for record in slices if record["kind"] == "master")
    flip(step / "rank-00000.safetensors", record["offset"])


def sign(step: Path, body: bytes) -> None:
    """Writes the manifest ``body``, given without its closing brace, with a correct checksum."""
    (step / "manifest.json").write_bytes(body + b',\n"manifest_crc32c": "%08x"}\n' % checksum(body))


def edit_manifest(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest and signs it again, as an attacker or a strange tool would."""
    fields = json.loads((step / "manifest.json").read_text())
    del fields["manifest_crc32c"]
    replaced = change(fields)
    sign(step, json.dumps(replaced if isinstance(replaced, list) else fields)[:-1].encode())


def nested(levels: int) -> Any:
    """A list in a list, and so on."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def hostile_value(generator: random.Random) -> Any:
    """A JSON value that a reader may not expect."""
    number = generator.choice(NUMBERS)
    makers = [
        lambda: number,
        lambda: -number,
        lambda: float(min(number, 1 << 64)) / 3,
        lambda: generator.choice(TEXTS),
        lambda: generator.choice([None, True, False, [], {}, 1e308, float("nan"), float("inf")]),
        lambda: [number] * generator.choice([1, 3, 70, 2000]),
        lambda: [generator.choice(TEXTS)],
        lambda: {generator.choice(TEXTS): number},
        lambda: nested(generator.choice([5, 150, 800])),
        lambda: {"$tensor": {"dtype": "float32", "shape": [number, 0], "data": ""}},
        lambda: {"$dict": [[{"$tuple": [[1]]}, number]]},
        lambda: {f"key{each}": each for each in range(500)},
    ]
    return generator.choice(makers)()


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with every one of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        item = pending.pop()
        keys = item.keys() if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        found.extend((item, key) for key in keys)
        pending.extend(item[key] for key in keys)
    return found


def mutate_json(value: Any, generator: random.Random) -> Any:
    """Replaces, removes, doubles or exchanges one to three items anywhere in `value`, which is changed."""
    for _ in range(generator.randint(1, 3)):
        items = items_of(value)
        if not items or generator.random() < 0.02:
            return hostile_value(generator)
        owner, key = generator.choice(items)
        action = generator.randrange(5)
        if action == 0:
            del owner[key]
        elif action == 1 and isinstance(owner, list):
            owner.insert(key, json.loads(json.dumps(owner[key])))
        elif action == 2:
            other, other_key = generator.choice(items)
            owner[key] = json.loads(json.dumps(other[other_key]))
        elif action == 3 and isinstance(owner, dict):
            owner[generator.choice(TEXTS)] = owner.pop(key)
        else:
            owner[key] = hostile_value(generator)
    return value


def mutated_text(text: str, generator: random.Random) -> bytes:
    """JSON `text` with a mutation of its values."""
    try:
        return json.dumps(mutate_json(json.loads(text), generator)).encode()
    except RecursionError:  # deeper than json writes
        return b"[" * 5000


def mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    """Changes, removes, doubles or inserts bytes in one to four places."""
    content = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        begin = generator.randrange(len(content) + 1)
        end = min(len(content), begin + generator.choice([1, 2, 4, 8, 100, 5000]))
        action = generator.randrange(6)
        if action == 0 and begin < len(content):
            content[begin] ^= 1 << generator.randrange(8)
        elif action == 1:
            content[begin:end] = generator.choice(NUMBERS).to_bytes(26, "little")[: end - begin]
        elif action == 2:
            del content[begin:end]
        elif action == 3:
            content[begin:begin] = content[begin:end] * generator.choice([1, 10])
        elif action == 4:
            content[begin:begin] = generator.randbytes(generator.choice([1, 16, 300]))
        else:
            del content[begin if generator.random() < 0.2 else len(content) - 1 :]
    return bytes(content)
