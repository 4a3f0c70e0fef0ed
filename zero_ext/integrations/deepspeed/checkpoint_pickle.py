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
from typing import Any, BinaryIO

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.regular_file import open_regular
from zero_ext.integrations.deepspeed.checkpoint_pickle_scan import check_expanded, check_opcodes

_READ_BYTES = 1 << 20


class StubScaler:
    """Stands for DeepSpeed's loss scalers: attributes, no behaviour."""


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
    """The dict that ``torch.save`` wrote to ``path``, tensors mapped from the file and not yet read.

    Time and memory are linear in the size of the file. CheckpointError names the file, and the class or
    function if one is neither torch's own nor among the stubs above: nothing of it has been imported or
    called. The same for a file that is missing, no regular file, truncated, compressed or not written by
    ``torch.save``, for a tensor that reaches outside its file, and for content that repeats itself so often
    that it is much larger than the file.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _refuse_compression(file, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    with _only_stubs():
        _refuse_globals(path)
        pickle_bytes = _check_pickle(path)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(f"{path}: refused or damaged: {_first_line(error)}") from error
    if type(found) is not dict:
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, wanted a dict; is it DeepSpeed's?")
    try:
        check_expanded(found, pickle_bytes, size)
    except ValueError as error:
        raise _repeats(path, error) from None
    _check_tensors(found, path)
    return found


def verify_pickled(path: Path) -> None:
    """Reads every byte of ``path`` and compares the checksums that ``torch.save`` has put into it.

    Only of the kinds of record that it writes: no compression, so no record is longer than the file.

    CheckpointError names the file and the record that is damaged.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"record {record.filename!r:.80} is compressed")
                with archive.open(record) as content:
                    while content.read(_READ_BYTES):
                        pass
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged: {_first_line(error)}; use another checkpoint, or verify=False if it was saved "
            "without checksums"
        ) from error


@contextmanager
def _only_stubs() -> Iterator[None]:
    """Lets torch build the stubs and what it knows itself, and nothing that others have registered."""
    with _allowing:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(_STUBS))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _refuse_globals(path: Path) -> None:
    try:
        foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or not written by torch.save: {_first_line(error)}"
        ) from error
    if foreign:
        raise CheckpointError(
            f"{path}: holds {', '.join(foreign[:5])}, which is refused: loading it could run code. Only "
            "tensors, plain values and DeepSpeed's loss scaler, stage and fragment address are read; save "
            "the checkpoint again without it, as in client_state"
        )


def _refuse_compression(file: BinaryIO, path: Path) -> None:
    """A compressed record can be a thousand times as long as the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [record for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or not written by torch.save: {_first_line(error)}"
        ) from error
    if packed:
        raise CheckpointError(f"{path}: damaged: record {packed[0].filename!r:.80} is compressed")


def _check_pickle(path: Path) -> int:
    """The length of the pickle in bytes, after a check of its opcodes."""
    try:
        data = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        check_opcodes(data, (name for _, name in _STUBS))
    except Exception as error:
        raise _repeats(path, error) from error
    return len(data)


def _repeats(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: refused: expected what DeepSpeed's save_checkpoint writes, got another pickle: "
        f"{_first_line(error)}. Save the checkpoint again without it, or use another one."
    )


def _check_tensors(value: object, path: Path) -> None:
    """Every tensor lies inside its storage, which torch does not promise for mapped files."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            _check_tensor(item, path)
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)


def _check_tensor(tensor: torch.Tensor, path: Path) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(f"{path}: holds a tensor of {tensor.layout} on {tensor.device}; strided wanted")
    if tensor.numel() == 0:
        return
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + reach) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: a tensor of shape {tuple(tensor.shape)} reaches byte {end} of a record of "
            f"{tensor.untyped_storage().nbytes()}; the file is damaged or forged"
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    for mark in ("Unsupported global", "Trying to"):
        if mark in text:
            return text[text.index(mark) :].split(". ")[0].splitlines()[0]
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
