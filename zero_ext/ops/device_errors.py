"""Errors that kernels find in values that only their device sees."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import inplace, load_kernels, op

DEVICE_ERROR_WORDS = 7


def pop_device_error_(record: Tensor) -> None:
    """Move the first error that kernels of `record`'s device found since the last call into it.

    The device does so in the order of its current stream, and the host does not wait. An error is returned
    once. The ops on the CPU raise their errors themselves, so there is none.

    Args:
        record: int64 [7], on the CPU or a CUDA device. It becomes zeros without an error, and its first
            number is not 0 with one. :func:`device_error_text` reads it.

    Raises:
        RuntimeError: `record` has the wrong dtype, device, layout or size.
    """
    inplace("pop_device_error_")(record)


def device_error_text(record: Tensor) -> str:
    """Return what an error says: op, argument, index, the value that was expected and the one found.

    Args:
        record: int64 [7] on the CPU, from :func:`pop_device_error_`.

    Returns:
        A sentence, empty if `record` holds no error.

    Raises:
        RuntimeError: `record` has the wrong dtype, device, layout or size.
    """
    return str(op("device_error_text")(record))


def raise_device_errors(device: torch.device | int | str) -> None:
    """Raise the first error that the kernels of an accelerator found in their arguments, and forget it.

    Ops on a CUDA device do not wait for the values in their tensors. Where a kernel finds one that it cannot
    use, it records it and changes nothing (an optimizer's step) or returns NaN or zeros. A prepared model
    raises such errors from its steps. Whoever calls the ops without one calls this where a wait for the
    device does no harm. It waits for the current stream.

    Args:
        device: its errors are raised; on a CPU ops raise theirs immediately.

    Raises:
        RuntimeError: a kernel found a value that it cannot use. The error names the op, the argument, the
            index, the value found and the one expected.
    """
    target = torch.device(device)
    load_kernels(target)
    record = torch.zeros(DEVICE_ERROR_WORDS, dtype=torch.int64, device=target)
    pop_device_error_(record)
    text = device_error_text(record.cpu())
    if text:
        raise RuntimeError(f"{record.device}: {text} Check what computes the value.")
