"""LAMB on flat shards in two passes: the norms behind the trust ratios, then the step."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import check_one_device, fake_kernel, op


def lamb_norms_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segments: Tensor,
    hyper: Tensor,
    grad_scale: Tensor,
    norms: Tensor,
) -> None:
    """Add to ``norms`` the exact sums of squares of each segment's weights, and of the update that
    :func:`lamb_step_` with the same arguments would scale by its trust ratio; nothing else changes.

    Args:
        norms: int64 [S, 2, 33], zeros before the first call: for each segment two accumulators as of
            :func:`squared_norm_`, which can be summed over parts of a parameter and over ranks, so that the
            norms do not depend on where those end.

    The other arguments are :func:`lamb_step_`'s, without its flag. Trust ratios are not read.

    Raises:
        RuntimeError: as :func:`lamb_step_`; nothing has been changed.
    """
    op("lamb_norms_")(master, exp_avg, exp_avg_sq, grad, segments, hyper, grad_scale, norms)
    torch.autograd.graph.increment_version(norms)


def lamb_step_(
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

    Per element, in float32: the gradient g is multiplied by `grad_scale` (unscale x clip); the moments become
    m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2; the update is
    (m / correction1) / (sqrt(v / correction2) + eps) + weight_decay w; the master weight w steps by
    lr x trust_ratio against it, and its value is cast to `param`.

    Args:
        master: float32 [n], master weights.
        exp_avg: float32 or bfloat16 [n], the first moment.
        exp_avg_sq: the second moment, like the first.
        grad: float32, bfloat16 or float16 [n].
        param: float32, bfloat16 or float16 [n], or None when `master` is the parameter itself.
        segments: int64 [S, 2] of (begin, end): sorted, disjoint, inside n. Elements outside every segment
            stay untouched.
        hyper: float64 [S, 10], per segment: lr, beta1, beta2, eps, weight_decay, correction1 and correction2
            (1 - beta^step, or 1 without bias correction), eps_inside_sqrt and maximize (0 or 1), trust_ratio.
            With eps_inside_sqrt eps is added to v / correction2. A trust ratio of NaN makes the weights NaN.
        grad_scale: float32, 0-d. If it is not finite the step is skipped: nothing changes, on any device.
        non_finite: int32 [1] or None. Set to 1 if a new master weight or moment is NaN or infinite, and left
            alone otherwise.

    All tensors are contiguous, on one device, and share no memory with one another.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, buffers overlap, or a
            hyper-parameter is outside its range; nothing has been changed.

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (arXiv
    1904.00962), algorithm 2.
    """
    op("lamb_step_")(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, grad_scale, non_finite)
    written = [master, exp_avg, exp_avg_sq, param, non_finite]
    torch.autograd.graph.increment_version([each for each in written if each is not None])


@fake_kernel("lamb_norms_")
def _lamb_norms_(*tensors: Tensor, **named: Tensor) -> None:
    check_one_device("lamb_norms_", [*tensors, *named.values()])


@fake_kernel("lamb_step_")
def _lamb_step_(*tensors: Tensor | None, **named: Tensor | None) -> None:
    check_one_device("lamb_step_", [each for each in (*tensors, *named.values()) if each is not None])
