"""``linear_cross_entropy``: a language model's head and its loss in chunks of tokens, without all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zero_ext.activation.chunked_checkpoint import ChunkTokens, check_chunk_tokens

LossReduction = Literal["mean", "sum", "none"]

CHUNK_BYTES = 128 << 20
"""Memory of a chunk's logits, and of what is computed from them, with ``chunk_tokens="auto"``."""
# Rows of logits that a CPU's core holds in its cache over the passes of a softmax.
_CACHE_BYTES = 1 << 20
# Rows of a chunk's product for the weight's gradient that are computed before they are added in float32.
_PRODUCT_BYTES = 8 << 20


@dataclass(frozen=True)
class _LossOptions:
    chunk_tokens: ChunkTokens
    ignore_index: int
    reduction: LossReduction
    label_smoothing: float
    z_loss: float
    softcap: float | None

    def __post_init__(self) -> None:
        check_chunk_tokens(self.chunk_tokens)
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(
                f"reduction: expected 'mean', 'sum' or 'none', got {self.reduction!r}. Correct it."
            )
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"label_smoothing: expected 0 to 1, got {self.label_smoothing!r}. Choose a fraction."
            )
        if not 0 <= self.z_loss < float("inf"):
            raise ValueError(
                f"z_loss: expected a finite factor of at least 0, got {self.z_loss!r}. Correct it."
            )
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(
                f"softcap: expected a finite number above 0 or None, got {self.softcap!r}. Correct it."
            )


class _VocabularySlice(NamedTuple):
    """This rank computes the logits of some words: those from ``first`` on, of ``size`` over ``group``.

    No rank has more words than ``largest``.
    """

    first: int
    size: int
    largest: int
    group: dist.ProcessGroup | None

    def check_same(self, labels: Tensor) -> None:
        """Check that all ranks have the same labels [n]. With FSDP2, ranks with tokens of their own hold
        slices of a weight that look like those of a vocabulary."""
        if self.group is None:
            return
        positions = torch.arange(1, len(labels) + 1, device=labels.device)
        digest = torch.stack([(labels * positions).sum(), positions.new_tensor(len(labels))])
        extremes = torch.cat([digest, -digest])
        self.all_reduce(extremes, dist.ReduceOp.MAX)
        torch._assert_async(
            (extremes[:2] == -extremes[2:]).all(),
            "labels: expected the same on all ranks that the weight is split over, got others. Pass the same "
            "tokens, or the full weight.",
        )

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce ``tensor`` over the ranks of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, op, group=self.group)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_tokens: ChunkTokens = "auto",
    ignore_index: int = -100,
    reduction: LossReduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    shift: bool = False,
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias` without holding logits of more than a chunk.

    Where gradients are needed, forward computes them chunk by chunk as well, so no chunk's logits are
    computed twice and backward only scales. It can run once, also with `retain_graph`. With reduction "none"
    the gradient of each loss is known in backward only, which then computes the logits again.

    Values are those of `torch.nn.functional.cross_entropy` on logits in the dtype of `hidden`. Losses, and
    the sum of the weight's gradient over tokens, are computed in float32 at least. In float16 a word of a
    probability below 3e-8 gets no gradient.

    Memory besides inputs and gradients is that of one chunk. From forward to backward the gradients of
    `weight` and `bias` are stored in float32 at least, that of `hidden` in its dtype.

    In stage 3, read `weight` inside the model's forward (`self.head.weight`). It is gathered once there.

    Source: Wijmans et al., "Cut your losses in large-vocabulary language models" (arXiv 2411.09009), and for
    the z-loss Chowdhery et al., "PaLM" (arXiv 2204.02311), section 5.

    Args:
        hidden: [..., width], float. Under autocast it is cast as for a linear layer.
        weight: [vocabulary, width], of the dtype of `hidden`. A `DTensor` split along its first dimension
            computes the loss of a vocabulary split over the ranks of its mesh, as a collective of these. They
            pass the same `hidden` and `labels`.
        labels: [...], int64 or int32.
        bias: [vocabulary] or None, split as `weight`.
        chunk_tokens: most tokens of a chunk. "auto" computes it from 128 MiB.
        ignore_index: label of tokens that do not count.
        reduction: "mean" over the tokens that count, NaN if there are none; "sum"; or "none".
        label_smoothing: fraction of each target that is spread evenly over the vocabulary.
        z_loss: factor of the squared logarithm of the softmax's denominator, which is added to the loss of
            each token that counts.
        softcap: replaces logits x by `softcap * tanh(x / softcap)`, as in Gemma 2.
        shift: whether the label of each token is that of the next one in the last dimension of `labels`. The
            last token of each sequence has none.

    Returns:
        0-d, or for reduction "none" of the shape of `labels`, less its last entry with `shift`; float32, or
        float64 for such inputs.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        RuntimeError: a label is outside the vocabulary, labels differ between the ranks of a split weight,
            or backward runs a second time, with `create_graph`, or under `torch.func`.

    Examples:
        >>> hidden, weight = torch.ones(2, 5, 8, requires_grad=True), torch.zeros(50, 8)
        >>> labels = torch.zeros(2, 5, dtype=torch.int64)
        >>> loss = zero_ext.linear_cross_entropy(hidden, weight, labels, shift=True, chunk_tokens=4)
        >>> round(loss.item(), 4)  # log(50)
        3.912
    """
    options = _LossOptions(chunk_tokens, ignore_index, reduction, label_smoothing, z_loss, softcap)
    _check_labels(hidden, labels)
    labels = labels.long()
    if shift:
        ignored = torch.full_like(labels[..., :1], ignore_index)
        labels = torch.cat([labels[..., 1:], ignored], -1)
    found = _loss(hidden, weight, bias, labels, options)
    return found[..., :-1] if shift and reduction == "none" else found


def _check_labels(hidden: Tensor, labels: Tensor) -> None:
    if hidden.dim() < 2 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels: expected shape [...] for hidden [..., width], got {tuple(labels.shape)} for "
            f"{tuple(hidden.shape)}. Pass one label per token."
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels: expected int64 or int32, got {labels.dtype}. Pass the index of each token's word."
        )


def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: _LossOptions
) -> Tensor:
    """Return the reduced loss. A released parameter of stage 3 calls it again with its gathered value."""
    tensors = tuple(each for each in (hidden, weight, bias) if each is not None)
    if has_torch_function(tensors):
        found: Tensor = handle_torch_function(_loss, tensors, hidden, weight, bias, labels, options)
        return found
    hidden, weight, bias, vocabulary = _local_tensors(hidden, weight, bias)
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden, weight = _autocast(hidden), _autocast(weight)
        bias = None if bias is None else _autocast(bias)
    _check_head(hidden, weight, bias)
    rows = labels.flatten()
    vocabulary.check_same(rows)
    counted = rows != options.ignore_index
    inside = (rows >= 0) & (rows < vocabulary.size)
    torch._assert_async(
        (inside | ~counted).all(),
        f"labels: expected 0 to {vocabulary.size - 1} or ignore_index ({options.ignore_index}), got some "
        f"outside of the vocabulary of {vocabulary.size}. Correct the labels.",
    )
    differentiate = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (hidden, weight, bias)
    )
    losses: Tensor = _ChunkedLoss.apply(
        hidden.flatten(0, -2), weight, bias, rows, vocabulary, options, differentiate
    )
    return losses.view(labels.shape) if options.reduction == "none" else losses


def _autocast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in autocast's dtype; float64 stays, as for a linear layer."""
    wide = tensor.dtype == torch.float64
    return tensor if wide else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _local_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, _VocabularySlice]:
    """Return the plain tensors of this rank, which stay connected to those given, and its words."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(weight, DTensor):
        if isinstance(hidden, DTensor):
            raise ValueError(
                "hidden: expected a plain tensor, as the weight is, got a DTensor. Pass its local tensor."
            )
        words = weight.shape[0] if weight.dim() else 0
        return hidden, weight, bias, _VocabularySlice(0, words, words, None)
    mesh, vocabulary = weight.device_mesh, weight.shape[0]
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and (not isinstance(each, DTensor) or each.placements != (Shard(0),)):
            placed = each.placements if isinstance(each, DTensor) else type(each).__name__
            raise ValueError(
                f"{name}: expected a DTensor split along its first dimension, got {placed}. Split the head "
                "by 'colwise_split_logits'."
            )
    share = -(-vocabulary // mesh.size())  # as torch's Shard: the last ranks have less
    if share * (mesh.size() - 1) >= vocabulary:
        raise ValueError(
            f"vocabulary: expected words for all {mesh.size()} ranks, got {vocabulary}, which leaves ranks "
            f"without one. Use fewer than {mesh.size()} ranks."
        )
    if isinstance(hidden, DTensor):
        if hidden.placements != (Replicate(),):
            raise ValueError(
                f"hidden: expected all tokens on all ranks of the vocabulary, got {hidden.placements}. "
                "Pass them replicated."
            )
        hidden = hidden.to_local(grad_placements=[Replicate()])
    local_bias = bias.to_local() if isinstance(bias, DTensor) else None
    found = _VocabularySlice(share * mesh.get_local_rank(), vocabulary, share, mesh.get_group())
    return hidden, weight.to_local(), local_bias, found


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [vocabulary, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}. Pass the weight of the head."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}. Pass the head's bias."
        )
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: expected one float dtype of hidden, weight and bias, got {sorted(map(str, dtypes))}. "
            "Convert them, or use autocast."
        )


class _ChunkedLoss(torch.autograd.Function):
    """Losses of tokens [n] with hidden [n, width], and their gradients, chunk by chunk."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocabulary: _VocabularySlice,
        options: _LossOptions,
        differentiate: bool,
    ) -> Tensor:
        late = options.reduction == "none"
        needed = context.needs_input_grad[:3] if differentiate and not late else (False,) * 3
        head = _ChunkedHead(hidden, weight, bias, vocabulary, options)
        counted = labels != options.ignore_index
        # Gradients stay unscaled until backward: those of a mean over many tokens would vanish in fp16.
        losses, context.gradients = head.run(labels, counted.to(head.dtype), needed)
        losses = losses.where(counted, 0)
        if late:
            context.save_for_backward(hidden, weight, bias, labels, counted)
            context.vocabulary, context.options = vocabulary, options
            return losses
        context.dtype = hidden.dtype
        context.count = counted.sum() if options.reduction == "mean" else None
        return losses.sum() if context.count is None else losses.sum() / context.count

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy: expected backward without create_graph, got it with create_graph. "
                "Gradients have no gradients here. Use torch's linear and cross_entropy."
            )
        return _ChunkedLoss._gradients(context, gradient)

    @staticmethod
    def _gradients(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if context.saved_tensors:
            hidden, weight, bias, labels, counted = context.saved_tensors
            head = _ChunkedHead(hidden, weight, bias, context.vocabulary, context.options)
            _, found = head.run(labels, gradient.where(counted, 0), context.needs_input_grad[:3])
            return *(None if each is None else each.to(hidden.dtype) for each in found), *_NO_GRADIENTS
        gradients, context.gradients = context.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: expected one backward, got a second one. Forward computes its "
                "gradients once. Call it again, or use reduction='none'."
            )
        # With no token that counts the gradients are zero, as torch's.
        scale = gradient if context.count is None else gradient / context.count.clamp(min=1)
        scaled = (None if each is None else _scale(each, scale).to(context.dtype) for each in gradients)
        return *scaled, *_NO_GRADIENTS


_NO_GRADIENTS = (None,) * 4  # of the arguments behind the bias


class _ChunkedHead:
    """A head with the logits of one chunk of tokens at a time in memory, in one buffer.

    The buffer holds a chunk's logits, then their gradient. Sums are in ``dtype``.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocabulary: _VocabularySlice,
        options: _LossOptions,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._vocabulary, self._options = vocabulary, options
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        words = weight.shape[0]
        # A CPU takes a few rows through all passes of the softmax while they are in its cache. A kernel of a
        # GPU, and a collective, cost too much to be called for so few.
        cached = hidden.is_cpu and vocabulary.group is None
        self._block_rows = max(1, _CACHE_BYTES // max(1, words * self.dtype.itemsize)) if cached else None

    def run(
        self, labels: Tensor, factors: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return each token's loss, and the gradients of hidden, weight and bias that are ``needed``.

        Gradients are those of the losses times ``factors`` [n], of weight and bias in ``dtype``.
        """
        hidden, weight, bias = self._hidden, self._weight, self._bias
        chunk = self._chunk_rows(of_weight=needed[1])
        logits = hidden.new_empty(chunk, weight.shape[0])
        losses = hidden.new_empty(len(hidden), dtype=self.dtype)
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=self.dtype) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=self.dtype) if bias is not None and needed[2] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, min(start + chunk, len(hidden)))
            inputs, values = hidden[rows], logits[: rows.stop - start]
            if bias is None:
                torch.mm(inputs, weight.T, out=values)
            else:
                torch.addmm(bias, inputs, weight.T, out=values)
            block = self._block_rows or chunk
            for first in range(start, rows.stop, block):
                few = slice(first, min(first + block, rows.stop))
                scales = factors[few] if any(needed) else None
                losses[few] = self._losses(values[first - start : few.stop - start], labels[few], scales)
            if of_hidden is not None:
                torch.mm(values, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight, values.T, inputs)
            if of_bias is not None:
                of_bias += values.sum(0, dtype=self.dtype)
        if of_hidden is not None:
            self._vocabulary.all_reduce(of_hidden)
        return losses, (of_hidden, of_weight, of_bias)

    def _chunk_rows(self, of_weight: bool) -> int:
        """Return the tokens of a chunk, the same on all ranks. All chunks are equal, up to rounding."""
        tokens, words, chunk = len(self._hidden), self._vocabulary.largest, self._options.chunk_tokens
        if chunk == "auto":
            # Copies in a wider dtype are made of all logits of a chunk: here on a GPU, in gemm on a CPU. The
            # slope of the softcap is made of a block, which is small on a CPU.
            copies = (self._weight.dtype != self.dtype) * self.dtype.itemsize
            if self._options.softcap is not None and self._block_rows is None:
                copies += self.dtype.itemsize
            inputs = self._weight.shape[1] * self.dtype.itemsize if of_weight and copies else 0
            nbytes = words * (self._weight.itemsize + copies) + inputs
            chunk = (CHUNK_BYTES - _PRODUCT_BYTES) // max(1, nbytes)
        number = -(-tokens // max(1, chunk))
        return max(1, -(-tokens // max(1, number)))

    def _losses(self, logits: Tensor, labels: Tensor, factors: Tensor | None) -> Tensor:
        """Return the losses of tokens [n] with ``logits`` [n, words], and replace logits by their gradient,
        times ``factors``, unless these are None."""
        options, vocabulary, size = self._options, self._vocabulary, self._vocabulary.size
        smoothing = options.label_smoothing
        values, slope = logits.to(self.dtype), None
        if options.softcap is not None:
            values.div_(options.softcap).tanh_()
            slope = None if factors is None else torch.square(values).neg_().add_(1)
            values.mul_(options.softcap)
        largest = values.amax(-1)
        vocabulary.all_reduce(largest, dist.ReduceOp.MAX)
        values.sub_(largest[:, None])
        index = labels - vocabulary.first
        owned = (index >= 0) & (index < logits.shape[-1])
        index = index.where(owned, 0)[:, None]
        label = values.gather(-1, index)[:, 0].where(owned, 0)
        rest = values.sum(-1) if smoothing else torch.zeros_like(label)
        sums = torch.stack([values.exp_().sum(-1), label, rest])
        vocabulary.all_reduce(sums)
        logarithm = sums[0].log()
        normalizer = logarithm + largest
        losses = logarithm - (1 - smoothing) * sums[1] - smoothing / size * sums[2]
        if factors is not None:
            scales = factors * (1 + 2 * options.z_loss * normalizer) / sums[0]
            values.mul_(scales[:, None])
            if smoothing:
                values.sub_((smoothing / size * factors)[:, None])
            values.scatter_add_(-1, index, ((smoothing - 1) * factors).where(owned, 0)[:, None])
            if slope is not None:
                values.mul_(slope)
            logits.copy_(values)
        return losses + options.z_loss * normalizer.square()


def _scale(gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiply ``gradient`` by ``scale`` [] in place. A device would round the scale to its dtype first."""
    rows = max(1, _PRODUCT_BYTES // max(1, gradient[:1].numel() * scale.itemsize))
    for block in gradient.split(rows):
        block.copy_(block.to(scale.dtype).mul_(scale))
    return gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, which may be of a wider dtype: a sum over tokens overflows fp16."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
        return
    wide = right.to(total.dtype) if right.is_cpu else right
    # The rows of the left side are copied on a CPU, those of the product on a GPU.
    rows = max(1, _PRODUCT_BYTES // max(1, sum(right.shape) * total.itemsize))
    for block, factor in zip(total.split(rows), left.split(rows), strict=True):
        if right.is_cpu:
            block.addmm_(factor.to(total.dtype), wide)
        else:
            block += torch.mm(factor, right, out_dtype=total.dtype)
