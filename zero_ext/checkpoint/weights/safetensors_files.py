"""Weights as Hugging Face keeps them: one safetensors file, or several with an index."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.files.safe_open import read_limited
from zero_ext.checkpoint.format.safetensors_header import LARGEST_HEADER_BYTES, StoredTensor, read_header

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Checked files, and the file number and offset of each tensor."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, tuple[int, StoredTensor]]

    def digest(self) -> str:
        """Return a hash of all tables, by which ranks check that they read the same files."""
        text = repr([[path.name for path in self.paths], sorted(self.tensors.items())])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find_weights(path: str | os.PathLike[str]) -> WeightFiles:
    """Return the tensors of ``path``: a .safetensors file, an index, or a folder with ``model.safetensors``
    or ``model.safetensors.index.json``.

    CheckpointError, naming the file, for one that is missing, damaged or hostile; nothing is unpickled, and
    nothing outside the index's own folder is opened.
    """
    root = Path(path).absolute()
    if root.is_dir():
        names = [name for name in (SINGLE_NAME, INDEX_NAME) if (root / name).exists()]
        if not names:
            seen = sorted(entry.name for entry in root.iterdir())[:8]
            raise CheckpointError(
                f"{root}: expected {SINGLE_NAME} or {INDEX_NAME} in it, got {seen}. Convert other formats "
                "with transformers: model.save_pretrained(folder)."
            )
        root = root / names[0]
    try:
        if root.suffix != ".json":
            return _collect({root: None})
        wanted: dict[Path, set[str] | None] = {}
        for key, name in _read_index(root).items():
            keys = wanted.setdefault(root.parent / name, set())
            if keys is not None:
                keys.add(key)
        return _collect(wanted)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or root}: it cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from error
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{root}: it names a file that no file system can hold: {error}. Repair the index."
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_limited(path, LARGEST_HEADER_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: it is not an index of safetensors files: {error}. Pass such an index, or a "
            ".safetensors file."
        ) from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{path}: it is not an index of safetensors files, since it has no 'weight_map'. Pass such an "
            "index, or a .safetensors file."
        )
    for key, name in names.items():
        plain = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        if not plain or "\0" in name:
            raise CheckpointError(
                f"{path}: file of {key!r}: expected a .safetensors file of the same folder, got {name!r}. "
                "Repair the index."
            )
    return names


def _collect(wanted: Mapping[Path, set[str] | None]) -> WeightFiles:
    """Return the tensors of all files; those of ``wanted``, where listed, must be in their file."""
    tensors: dict[str, tuple[int, StoredTensor]] = {}
    for number, (path, keys) in enumerate(wanted.items()):
        found = {tensor.entry.key: (number, tensor) for tensor in read_header(path)}
        absent = sorted((keys or set()) - found.keys())
        if absent:
            raise CheckpointError(
                f"{path}: {absent[0]!r} is not in it, though the index says so. Repair the index, or replace "
                "this file with an intact copy."
            )
        repeated = sorted(found.keys() & tensors.keys())
        if repeated:
            raise CheckpointError(
                f"{path}: {repeated[0]!r} is in another file of the same weights too. Remove it from one of "
                "them."
            )
        tensors |= found
    return WeightFiles(tuple(wanted), tensors)
