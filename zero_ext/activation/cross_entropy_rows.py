"""The softmax of rows of logits [n, words] and its gradient in their place, by an op and by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext import ops


def has_cpu_softmax(tensor: Tensor) -> bool:
    """Return whether :class:`CpuSoftmax` computes with logits like ``tensor``."""
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


class CpuSoftmax:
    """Logits in their own dtype, which a pass reads and another replaces.

    A label outside of the words is none. Logits x count as ``softcap * tanh(x / softcap)``. Only with
    ``differentiate`` there are gradients.
    """

    def __init__(self, logits: Tensor, labels: Tensor, softcap: float | None, differentiate: bool) -> None:
        self._logits, self._labels, self._softcap = logits, labels, softcap or 0.0

    def largest(self) -> Tensor:
        """Return the largest logit of each row, float32 [n] at least."""
        found = self._logits.amax(-1).float()
        return found.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else found

    def sums(self, largest: Tensor) -> Tensor:
        """Return sums [3, n] of each row less ``largest`` [n]: of the exponentials, the label's logit, of all
        logits."""
        return ops.softmax_sums(self._logits, self._labels, largest[None], self._softcap)

    def write_gradient(self, coefficients: Tensor) -> None:
        """Replace the logits by gradients, after :meth:`sums` with the same ``largest``. See
        :func:`zero_ext.ops.softmax_gradient_`."""
        ops.softmax_gradient_(self._logits, self._labels, coefficients, self._softcap)


class TorchSoftmax:
    """As :class:`CpuSoftmax`, on any device, with a copy in float32 of logits in a narrower dtype."""

    def __init__(self, logits: Tensor, labels: Tensor, softcap: float | None, differentiate: bool) -> None:
        self._logits = logits
        self._owned = (labels >= 0) & (labels < logits.shape[-1])
        self._index = labels.where(self._owned, 0)[:, None]
        # Logits, then logits less the largest, then their exponentials.
        self._values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self._slope: Tensor | None = None
        if softcap is not None:
            self._values.div_(softcap).tanh_()
            self._slope = torch.square(self._values).neg_().add_(1) if differentiate else None
            self._values.mul_(softcap)

    def largest(self) -> Tensor:
        """See :class:`CpuSoftmax`."""
        return self._values.amax(-1)

    def sums(self, largest: Tensor) -> Tensor:
        """See :class:`CpuSoftmax`."""
        values = self._values.sub_(largest[:, None])
        label = values.gather(-1, self._index)[:, 0].where(self._owned, 0)
        rest = values.sum(-1)
        return torch.stack([values.exp_().sum(-1), label, rest])

    def write_gradient(self, coefficients: Tensor) -> None:
        """See :class:`CpuSoftmax`."""
        _, scale, uniform, target = coefficients
        self._values.mul_(scale[:, None])
        self._values.sub_(uniform[:, None])
        self._values.scatter_add_(-1, self._index, target.neg().where(self._owned, 0)[:, None])
        if self._slope is not None:
            self._values.mul_(self._slope)
        self._logits.copy_(self._values)
