"""One-pass Adam and AdamW on flat shards with moments quantized block-wise to 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.compression.blockwise import Quantized
from zero_ext.ops.load_library import check_one_device, fake_kernel, op


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
    op("adam_step_8bit_")(*tensors, segments, hyper, grad_scale, non_finite)
    written = [master, *exp_avg, *exp_avg_sq, param, non_finite]
    torch.autograd.graph.increment_version([each for each in written if each is not None])


@fake_kernel("adam_step_8bit_")
def _adam_step_8bit_(*tensors: Tensor | None, **named: Tensor | None) -> None:
    present = [tensor for tensor in (*tensors, *named.values()) if tensor is not None]
    check_one_device("adam_step_8bit_", present)
