"""Opens the pickled files of a DeepSpeed checkpoint without running anything that is in them.

torch's restricted unpickler builds tensors and plain values. The few classes of DeepSpeed's that such files
hold are replaced by the inert ones here; any other class or function is refused by name.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.files import open_regular
from zero_ext.config.config_errors import clause_of
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle_scan import (
    UnfitContent,
    check_expanded,
    check_opcodes,
)

_READ_BYTES = 1 << 20


class StubScaler:
    """Stands for DeepSpeed's loss scalers: attributes, no behavior."""


class StubFragment:
    """Stands for the address of a parameter's fragment in a partition: ``numel`` and ``start``."""


class StubStage(int):
    """Stands for the enumeration of ZeRO stages: the number."""


_STUBS: list[tuple[type, str]] = [
    (StubScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StubScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StubFragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (StubStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
# What torch allows is one list for the whole process.
_allowing = threading.Lock()


def read_pickled(path: Path) -> dict[Any, Any]:
    """Return the dict that ``torch.save`` wrote to ``path``, tensors mapped from the file and not yet read.

    Time and memory are linear in the size of the file. CheckpointError names the file, and the class or
    function if one is neither torch's own nor among the stubs above: nothing of it has been imported or
    called. The same for a file that is missing, no regular file, truncated, compressed or not written by
    ``torch.save``, for a tensor that reaches outside its file, and for content that repeats itself so often
    that it is much larger than the file.
    """
    with _archive(path):
        pass
    try:
        pickle = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        check_opcodes(pickle, (name for _, name in _STUBS))
        with _only_stubs():
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if type(found) is not dict:
            raise UnfitContent(f"it holds a {type(found).__name__}, not a dict")
        check_expanded(found, len(pickle), path.stat().st_size)
    except Exception as error:
        raise CheckpointError(
            f"{path}: refused: expected what DeepSpeed's save_checkpoint writes, got another pickle: "
            f"{_first_line(error)}. Save the checkpoint again without it, as in client_state, or use another "
            "one."
        ) from error
    return found


def verify_pickled(path: Path) -> None:
    """Read every byte of ``path`` and compares the checksums that ``torch.save`` has put into it.

    Only of the kinds of record that it writes: no compression, so no record is longer than the file.

    CheckpointError names the file and the record that is damaged.
    """
    with _archive(path, "Use another checkpoint, or verify=False if it was saved without.") as archive:
        for record in archive.infolist():
            with archive.open(record) as content:
                while content.read(_READ_BYTES):
                    pass


@contextmanager
def _archive(path: Path, advice: str = "Use another checkpoint.") -> Iterator[zipfile.ZipFile]:
    try:
        with os.fdopen(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                # One that is compressed can be a thousand times as long as the file.
                if record.compress_type != zipfile.ZIP_STORED:
                    raise UnfitContent(f"record {record.filename!r:.80} is compressed")
            yield archive
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or not written by torch.save: {_first_line(error)}. {advice}"
        ) from error


@contextmanager
def _only_stubs() -> Iterator[None]:
    """Let torch build the stubs and its own classes, and nothing that others have registered."""
    with _allowing:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(_STUBS))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    for mark in ("Unsupported global", "Trying to"):
        if mark in text:
            return text[text.index(mark) :].split(". ")[0].splitlines()[0]
    line = text.splitlines()[0] if text else "no reason given"
    return (
        clause_of(line) if isinstance(error, UnfitContent) else f"{type(error).__name__}: {clause_of(line)}"
    )
