"""The softmax of rows of logits on a CPU, for a cross entropy in chunks of tokens."""

from __future__ import annotations

from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, inplace, op


def softmax_sums(logits: Tensor, labels: Tensor, largest: Tensor, softcap: float) -> Tensor:
    """Return sums over each row of `logits`, each replaced by ``softcap * tanh(logit / softcap)``.

    Args:
        logits: float32, bfloat16 or float16 [tokens, words], contiguous, on the CPU.
        labels: int64 [tokens]; one outside of the words has no logit in these rows.
        largest: float32 [1, tokens], a number near the largest logit of each row, which is subtracted from
            all.
        softcap: 0 for none.

    Returns:
        float32 [3, tokens]: the sum of the exponentials, the logit of the label or 0 if there is none, and
        the sum of the logits; all less `largest`.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size.
    """
    return op("softmax_sums")(logits, labels, largest, softcap)


@fake_kernel("softmax_sums")
def _softmax_sums(logits: Tensor, labels: Tensor, largest: Tensor, softcap: float) -> Tensor:
    return largest.new_empty((3, logits.shape[0]))


def softmax_gradient_(logits: Tensor, labels: Tensor, coefficients: Tensor, softcap: float) -> None:
    """Replace each logit by ``exp(logit - largest) * scale - uniform``, the label's less its target.

    With a softcap the logits are those of :func:`softmax_sums`, and the gradients are multiplied by the
    derivative of the cap.

    Args:
        logits: float32, bfloat16 or float16 [tokens, words], contiguous, on the CPU.
        labels: int64 [tokens]; one outside of the words has no logit in these rows.
        coefficients: float32 [4, tokens]: largest, scale, uniform and target of each row.
        softcap: 0 for none.

    Raises:
        RuntimeError: an argument has the wrong dtype, device, layout or size, or memory overlaps; nothing has
            been changed.
    """
    inplace("softmax_gradient_")(logits, labels, coefficients, softcap)
