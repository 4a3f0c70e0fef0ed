"""Real text that ships with every Python installation, as bytes: language topics and docstrings.

A document is one of `pydoc`'s language topics, or all docstrings of one standard-library module. Docstrings
are parsed with `ast`, and nothing is imported or run. A hash of its name assigns each document to one side of
the split. Text that occurs twice is used once, so that no held-out text occurs in the training text.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_ONE_IN = 12
END_OF_TEXT = b"\0"
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_NOT_LIBRARY_TEXT = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, each a uint8 tensor [bytes], with a zero byte at the end of every text."""

    training: Tensor
    held_out: Tensor

    def write(self, folder: Path) -> None:
        """Save both sides as plain bytes in `folder`, so that other processes need not gather them again."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "training.txt").write_bytes(self.training.numpy().tobytes())
        (folder / "held_out.txt").write_bytes(self.held_out.numpy().tobytes())

    @staticmethod
    def read(folder: Path) -> Corpus:
        """Load the corpus that `write` saved in `folder`."""
        return Corpus(
            _as_tensor([(folder / "training.txt").read_bytes()]),
            _as_tensor([(folder / "held_out.txt").read_bytes()]),
        )


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of `length` bytes of `text`, as `input_ids` and `labels`, int64 [length]."""

    def __init__(self, text: Tensor, length: int) -> None:
        if text.numel() < length:
            raise ValueError(f"text: expected at least {length} bytes (one window), got {text.numel()}.")
        self.windows = text[: text.numel() // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].to(torch.int64)
        return {"input_ids": window, "labels": window}

    def spread(self, count: int) -> Tensor:
        """Return `count` windows at even distances in the text, int64 [count, length]."""
        starts = torch.arange(count) * len(self) // count
        return self.windows[starts].to(torch.int64)


def unigram_entropy(text: Tensor) -> float:
    """Return the entropy of `text` under its own byte frequencies, in nats per byte.

    No model that ignores context can reach a lower loss on this text.
    """
    frequencies = torch.bincount(text.flatten().to(torch.int64)).double() / text.numel()
    present = frequencies[frequencies > 0]
    return float(-(present * present.log()).sum())


def gather_corpus(library: Path = STANDARD_LIBRARY) -> Corpus:
    """Return the language topics and the docstrings below `library`, with the same split in every run."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[str] = set()
    for name, texts in sorted([*_topics(), *_modules(library)]):
        digest = hashlib.sha256(name.encode()).digest()
        held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0
        for text in texts:
            if text not in seen:
                seen.add(text)
                sides[held_out].append(text.encode() + END_OF_TEXT)
    return Corpus(_as_tensor(sides[False]), _as_tensor(sides[True]))


def _topics() -> Iterator[tuple[str, list[str]]]:
    for name, text in topics.items():
        yield f"topic {name}", [text]


def _modules(root: Path) -> Iterator[tuple[str, list[str]]]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _NOT_LIBRARY_TEXT.isdisjoint(relative.parts):
            yield f"module {relative.as_posix()}", _docstrings(path)


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # a template, or a file for another version of Python
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return [text for text in texts if text]


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
