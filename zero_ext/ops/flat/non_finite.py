"""A flag that says whether a tensor holds NaN or infinity."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


def flag_non_finite_(values: Tensor, non_finite: Tensor) -> None:
    """Set `non_finite` to 1 if an element of `values` is NaN or infinite, and leave it alone otherwise.

    The elements are compared as integers, so the op reads them at the speed of memory. On a CUDA device the
    host does not wait.

    Args:
        values: float32, bfloat16 or float16 [n], contiguous, on the CPU or a CUDA device.
        non_finite: int32 [1], on the same device. One flag may serve any number of tensors.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size; nothing has been changed.
    """
    op("flag_non_finite_")(values, non_finite)
    torch.autograd.graph.increment_version(non_finite)


@fake_kernel("flag_non_finite_")
def _flag_non_finite_(values: Tensor, non_finite: Tensor) -> None:
    check_one_device("flag_non_finite_", [values, non_finite])
