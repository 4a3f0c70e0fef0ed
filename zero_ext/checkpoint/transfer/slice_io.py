"""The values behind a slice, in memory or in a store: size, checks, transfers with errors that name the
slice.
"""

from __future__ import annotations

import torch

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.state_source import StoredValues


def element_count(values: torch.Tensor | StoredValues) -> int:
    """Return number of elements."""
    return values.numel() if isinstance(values, torch.Tensor) else values.numel


def byte_count(values: torch.Tensor | StoredValues) -> int:
    """Return bytes of all elements."""
    return element_count(values) * values.dtype.itemsize


def check_values(values: object, label: str) -> None:
    """TypeError or ValueError, beginning with ``label``, unless ``values`` may stand behind a slice."""
    if isinstance(values, torch.Tensor):
        if values.is_meta or values.dim() != 1 or not values.is_contiguous():
            raise ValueError(
                f"{label}: expected a contiguous tensor of one dimension in memory, got shape "
                f"{tuple(values.shape)}, stride {values.stride()} on {values.device}. Flatten it, and make "
                "it contiguous."
            )
        return
    if not isinstance(values, StoredValues):
        raise TypeError(
            f"{label}: expected a tensor or StoredValues, got {type(values).__name__}. Pass one of these."
        )
    if type(values.numel) is not int or values.numel < 0:
        raise ValueError(
            f"{label}: numel of its store: expected a number of elements, got {values.numel!r}. Return such "
            "a number."
        )
    if not isinstance(values.dtype, torch.dtype):
        raise TypeError(
            f"{label}: dtype of its store: expected a torch.dtype, got {values.dtype!r}. Return a "
            "torch.dtype."
        )


def read_stored(values: StoredValues, begin: int, end: int, label: str) -> torch.Tensor:
    """Return elements [begin, end) of what ``label`` names. CheckpointError if they cannot be had."""
    try:
        found = values.read(begin, end)
    except Exception as error:
        raise CheckpointError(_failure(label, "reading", begin, end, error)) from error
    if found.dtype != values.dtype or found.shape != (end - begin,):
        raise CheckpointError(
            f"{label}: a read of elements {begin} to {end} of its store: expected shape {(end - begin,)} of "
            f"{values.dtype}, got {tuple(found.shape)} of {found.dtype}. Fix the store."
        )
    return found.cpu()


def write_stored(values: StoredValues, begin: int, found: torch.Tensor, label: str) -> None:
    """Put ``found`` (1-D; floats convert) in the place of the elements from ``begin`` on.

    CheckpointError naming ``label`` if the store cannot take them.
    """
    try:
        values.write(begin, found.to(values.dtype))
    except Exception as error:
        raise CheckpointError(_failure(label, "writing", begin, begin + found.numel(), error)) from error


def _failure(label: str, doing: str, begin: int, end: int, error: Exception) -> str:
    failure = f"{doing} elements {begin} to {end} of its store failed: {type(error).__name__}: {error}"
    return f"{label}: {failure}. Check the store and its disk."
