"""One-pass Adam and AdamW on flat shards."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


def adam_step_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param: Tensor | None,
    segments: Tensor,
    hyper: Tensor,
    grad_scale: Tensor,
    non_finite: Tensor | None = None,
) -> None:
    """Update a flat shard in place, reading and writing every element once.

    Per element, in float32, as torch.optim.AdamW / Adam: the gradient is multiplied by `grad_scale`
    (unscale x clip), the moments are updated, the master weight steps, and its value is cast to `param`.

    Args:
        master: float32 [n], master weights.
        exp_avg, exp_avg_sq: float32 or bfloat16 (both the same) [n], the moments.
        grad: float32, bfloat16 or float16 [n].
        param: float32, bfloat16 or float16 [n], or None when `master` is the parameter itself.
        segments: int64 [S, 2] of (begin, end): sorted, disjoint, inside n. Elements outside every segment
            stay untouched.
        hyper: float64 [S, 8], per segment: lr, beta1, beta2, eps, weight_decay, step (1-based, this step
            included), decoupled (1 AdamW, 0 Adam), maximize (0 or 1).
        grad_scale: float32, 0-d. If it is not finite the step is skipped: nothing changes, on any device.
        non_finite: int32 [1] or None. Set to 1 if a new master weight or moment is NaN or infinite, and left
            alone otherwise.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory with one another.

    On a CUDA device the host does not wait: `segments`, `hyper` and `grad_scale` are read there, so a
    captured graph sees their new values. With values of `segments` or `hyper` outside their range the step
    changes nothing, and :func:`~zero_ext.ops.raise_device_errors` raises them. The moments are the CPU's, bit
    for bit; the master weights are so but for the last place of the device's `pow` in the bias corrections.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, buffers overlap, or a
            hyper-parameter is outside its range; nothing has been changed.

    Source: Kingma and Ba (arXiv 1412.6980), section 2; Loshchilov and Hutter (arXiv 1711.05101),
    algorithm 2.
    """
    op("adam_step_")(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, grad_scale, non_finite)
    written = [master, exp_avg, exp_avg_sq, param, non_finite]
    torch.autograd.graph.increment_version([each for each in written if each is not None])


@fake_kernel("adam_step_")
def _adam_step_(*tensors: Tensor | None, **named: Tensor | None) -> None:
    check_one_device("adam_step_", [each for each in (*tensors, *named.values()) if each is not None])
