"""One-pass Lion on flat shards."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


def lion_step_(
    master: Tensor,
    exp_avg: Tensor,
    grad: Tensor,
    param: Tensor | None,
    segments: Tensor,
    hyper: Tensor,
    grad_scale: Tensor,
    non_finite: Tensor | None = None,
) -> None:
    """Update a flat shard in place, reading and writing every element once.

    Per element, in float32: the gradient g is multiplied by `grad_scale` (unscale x clip); the master weight
    shrinks by lr x weight_decay of itself and steps by lr against the sign of beta1 m + (1 - beta1) g; the
    moment m becomes beta2 m + (1 - beta2) g; the master weight's value is cast to `param`. Where the sum is
    zero the weight does not step, where it is NaN the weight becomes NaN.

    Args:
        master: float32 [n], master weights.
        exp_avg: float32 or bfloat16 [n], the moment.
        grad: float32, bfloat16 or float16 [n].
        param: float32, bfloat16 or float16 [n], or None when `master` is the parameter itself.
        segments: int64 [S, 2] of (begin, end): sorted, disjoint, inside n. Elements outside every segment
            stay untouched.
        hyper: float64 [S, 5], per segment: lr, beta1, beta2, weight_decay, maximize (0 or 1).
        grad_scale: float32, 0-d. If it is not finite the step is skipped: nothing changes, on any device.
        non_finite: int32 [1] or None. Set to 1 if a new master weight or moment is NaN or infinite, and left
            alone otherwise.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory with one another. On
    a CUDA device the host does not wait, as in :func:`adam_step_`. Results are the CPU's, bit for bit.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, buffers overlap, or a
            hyper-parameter is outside its range; nothing has been changed.

    Source: Chen et al., "Symbolic discovery of optimization algorithms" (arXiv 2302.06675), algorithm 2.
    """
    op("lion_step_")(master, exp_avg, grad, param, segments, hyper, grad_scale, non_finite)
    written = [master, exp_avg, param, non_finite]
    torch.autograd.graph.increment_version([each for each in written if each is not None])


@fake_kernel("lion_step_")
def _lion_step_(*tensors: Tensor | None, **named: Tensor | None) -> None:
    check_one_device("lion_step_", [each for each in (*tensors, *named.values()) if each is not None])
