"""One-pass steps of optimizers on flat shards: Adam and AdamW, with moments in 8 bits too, LAMB, Lion."""

from __future__ import annotations

from torch import Tensor

from zero_ext.ops.compression import Quantized
from zero_ext.ops.load_library import inplace


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
    inplace("adam_step_")(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, grad_scale, non_finite)


def adam_step_8bit_(
    master: Tensor,
    exp_avg: Quantized,
    exp_avg_sq: Quantized,
    grad: Tensor,
    param: Tensor | None,
    segments: Tensor,
    hyper: Tensor,
    grad_scale: Tensor,
    non_finite: Tensor | None = None,
) -> None:
    """:func:`adam_step_` with moments of one byte per element and four bytes per block of 256.

    The update is computed in float32 from the dequantized moments; the master weights step with the new
    moments as they are before they are quantized again. `exp_avg` is in the signed code, `exp_avg_sq` in the
    unsigned one, see :func:`quantize_blockwise`. Memory of zero bytes, codes and scales, stands for zeros.

    Blocks are counted from the first element. One that no segment touches stays as it is. In one that a
    segment touches, elements outside every segment keep master and param; their moments are quantized again
    under the block's new scale, which leaves them unchanged only if the scale is. A moment that is not finite
    makes the moments of its whole block NaN.

    Args:
        master: float32 [n], master weights.
        exp_avg, exp_avg_sq: the moments of n elements.
        grad: float32, bfloat16 or float16 [n].
        param: float32, bfloat16 or float16 [n], or None when `master` is the parameter itself.
        segments, hyper, grad_scale, non_finite: as in :func:`adam_step_`. The flag is about moments before
            they are quantized again.

    All tensors are contiguous, on one device, the CPU or a CUDA one, and share no memory with one another.
    The result is the same, bit for bit, on every instruction set, for any number of threads, and for the
    buffers cut into chunks at multiples of 256 elements. On a CUDA device the host does not wait, and the
    result differs as that of :func:`adam_step_` does: in the last place of `pow`, which moments do not see.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, buffers overlap, or a
            hyper-parameter is outside its range; nothing has been changed.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization" (arXiv
    2110.02861), section 2.
    """
    tensors = [master, exp_avg.codes, exp_avg_sq.codes, exp_avg.scales, exp_avg_sq.scales, grad, param]
    inplace("adam_step_8bit_")(*tensors, segments, hyper, grad_scale, non_finite)


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
    inplace("lamb_norms_")(master, exp_avg, exp_avg_sq, grad, segments, hyper, grad_scale, norms)


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
    inplace("lamb_step_")(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, grad_scale, non_finite)


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
    inplace("lion_step_")(master, exp_avg, grad, param, segments, hyper, grad_scale, non_finite)
