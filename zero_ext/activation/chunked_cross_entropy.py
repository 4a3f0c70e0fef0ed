"""``linear_cross_entropy``: a language model's head and its loss in chunks of tokens, without all logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from zero_ext.activation.chunked_checkpoint import ChunkTokens, check_chunk_tokens
from zero_ext.activation.cross_entropy_rows import CpuSoftmax, TorchSoftmax, has_cpu_softmax
from zero_ext.activation.vocabulary_slice import VocabularySlice, local_tensors

LossReduction = Literal["mean", "sum", "none"]

CHUNK_BYTES = 128 << 20
"""Memory of a chunk's logits, and of what is computed from them, with ``chunk_tokens="auto"``."""
# Rows of a chunk's product for the weight's gradient that are computed before they are added in float32.
_PRODUCT_BYTES = 8 << 20
# Rows of the weight's gradient in float32 that are freed together; malloc returns less to the system late.
_SUM_BLOCK_BYTES = 33 << 20

_Blocks = list[Tensor]


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
    low_rank: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias` without holding logits of more than a chunk.

    Where gradients are needed, forward computes them chunk by chunk as well, so no chunk's logits are
    computed twice and backward only scales. It can run once, also with `retain_graph`. With reduction "none"
    the gradient of each loss is known in backward only, which then computes the logits again.

    Values are those of `torch.nn.functional.cross_entropy` on logits in the dtype of `hidden`. Losses, and
    the sum of the weight's gradient over tokens, are computed in float32 at least. In float16 a word of a
    probability below 3e-8 gets no gradient.

    Memory besides inputs and gradients is that of one chunk and of the sum in float32. From forward to
    backward the gradients of `weight` and `bias` are stored in float32 at least, that of `hidden` in its
    dtype.

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
        chunk_tokens: most tokens of a chunk. "auto" computes it from 128 MiB, less what the sum of the
            weight's gradient needs beyond that gradient, where this is at most a half.
        ignore_index: label of tokens that do not count.
        reduction: "mean" over the tokens that count, NaN if there are none; "sum"; or "none".
        label_smoothing: fraction of each target that is spread evenly over the vocabulary.
        z_loss: factor of the squared logarithm of the softmax's denominator, which is added to the loss of
            each token that counts.
        softcap: replaces logits x by `softcap * tanh(x / softcap)`, as in Gemma 2.
        shift: whether the label of each token is that of the next one in the last dimension of `labels`. The
            last token of each sequence has none.
        low_rank: pairs of inputs [..., rank] and factors [vocabulary, rank] of the dtype of `hidden`. Their
            products `inputs @ factors.T` are added to the logits, as LoRA does.

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
    _check_low_rank(hidden, weight, low_rank)
    labels = labels.long()
    if shift:
        ignored = torch.full_like(labels[..., :1], ignore_index)
        labels = torch.cat([labels[..., 1:], ignored], -1)
    found = _loss(hidden, weight, bias, labels, options, *(each for pair in low_rank for each in pair))
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


def _check_low_rank(hidden: Tensor, weight: Tensor, low_rank: Sequence[tuple[Tensor, Tensor]]) -> None:
    for pair in low_rank:
        shapes = [tuple(each.shape) for each in pair] if isinstance(pair, tuple | list) else []
        rank = shapes[0][-1:] if shapes else ()
        if shapes != [(*hidden.shape[:-1], *rank), (*weight.shape[:1], *rank)] or not rank:
            raise ValueError(
                "low_rank: expected pairs of shapes [..., rank] and [vocabulary, rank], for hidden "
                f"{tuple(hidden.shape)} and weight {tuple(weight.shape)}, got "
                f"{shapes or type(pair).__name__}. Pass a list of pairs with one row per token and per word."
            )


def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: _LossOptions,
    *low_rank: Tensor,
) -> Tensor:
    """Return the reduced loss. A released parameter of stage 3 calls it again with its gathered value."""
    tensors = tuple(each for each in (hidden, weight, bias, *low_rank) if each is not None)
    if has_torch_function(tensors):
        found: Tensor = handle_torch_function(
            _loss, tensors, hidden, weight, bias, labels, options, *low_rank
        )
        return found
    hidden, weight, bias, vocabulary = local_tensors(hidden, weight, bias)
    if low_rank and vocabulary.group is not None:
        raise ValueError(
            "low_rank: expected none with a weight that is split over ranks, got some. Pass the full weight."
        )
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden, weight = _autocast(hidden), _autocast(weight)
        bias = None if bias is None else _autocast(bias)
        low_rank = tuple(map(_autocast, low_rank))
    _check_head(hidden, weight, bias, low_rank)
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
        each is not None and each.requires_grad for each in (hidden, weight, bias, *low_rank)
    )
    terms = [hidden, weight, *low_rank]
    terms[::2] = [each.flatten(0, -2) for each in terms[::2]]
    losses: Tensor = _ChunkedLoss.apply(rows, vocabulary, options, differentiate, bias, *terms)
    return losses.view(labels.shape) if options.reduction == "none" else losses


def _autocast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in autocast's dtype; float64 stays, as for a linear layer."""
    wide = tensor.dtype == torch.float64
    return tensor if wide else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Sequence[Tensor]) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [vocabulary, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}. Pass the weight of the head."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}. Pass the head's bias."
        )
    dtypes = {each.dtype for each in (hidden, weight, bias, *low_rank) if each is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise ValueError(
            "hidden: expected one float dtype of hidden, weight, bias and low_rank, got "
            f"{sorted(map(str, dtypes))}. Convert them, or use autocast."
        )


class _ChunkedLoss(torch.autograd.Function):
    """Losses of tokens [n], and their gradients, chunk by chunk.

    Logits are the bias and the products of ``terms``: hidden [n, width], weight, and those of low rank.
    """

    @staticmethod
    def forward(
        context: Any,
        labels: Tensor,
        vocabulary: VocabularySlice,
        options: _LossOptions,
        differentiate: bool,
        bias: Tensor | None,
        *terms: Tensor,
    ) -> Tensor:
        late = options.reduction == "none"
        needed = context.needs_input_grad[_OPTIONS:]
        if late or not differentiate:
            needed = (False,) * len(needed)
        head = _ChunkedHead(bias, terms, vocabulary, options)
        counted = labels != options.ignore_index
        # Gradients stay unscaled until backward: those of a mean over many tokens would vanish in fp16.
        losses, context.gradients = head.run(labels, counted.to(head.dtype), needed)
        losses = losses.where(counted, 0)
        if late:
            context.save_for_backward(labels, counted, bias, *terms)
            context.vocabulary, context.options = vocabulary, options
            return losses
        context.dtype = terms[0].dtype
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
            labels, counted, bias, *terms = context.saved_tensors
            head = _ChunkedHead(bias, terms, context.vocabulary, context.options)
            _, found = head.run(labels, gradient.where(counted, 0), context.needs_input_grad[_OPTIONS:])
            joined = (None if each is None else _joined(each, terms[0].dtype) for each in found)
            return *(None,) * _OPTIONS, *joined
        gradients, context.gradients = context.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: expected one backward, got a second one. Forward computes its "
                "gradients once. Call it again, or use reduction='none'."
            )
        # With no token that counts the gradients are zero, as torch's.
        scale = gradient if context.count is None else gradient / context.count.clamp(min=1)
        scaled = (None if each is None else _joined(each, context.dtype, scale) for each in gradients)
        return *(None,) * _OPTIONS, *scaled


_OPTIONS = 4  # arguments before the bias, which have no gradients


class _ChunkedHead:
    """A head with the logits of one chunk of tokens at a time in memory, in one buffer.

    The buffer holds a chunk's logits, then their gradient. Sums are in ``dtype``.
    """

    def __init__(
        self,
        bias: Tensor | None,
        terms: Sequence[Tensor],
        vocabulary: VocabularySlice,
        options: _LossOptions,
    ) -> None:
        self._bias, self._inputs, self._weights = bias, terms[::2], terms[1::2]
        self._vocabulary, self._options = vocabulary, options
        hidden = self._inputs[0]
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._softmax = CpuSoftmax if has_cpu_softmax(hidden) else TorchSoftmax

    def run(
        self, labels: Tensor, factors: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor, tuple[_Blocks | None, ...]]:
        """Return each token's loss, and the gradients of the bias and the terms that are ``needed``.

        Gradients are those of the losses times ``factors`` [n], of weights and bias in ``dtype``.
        """
        hidden, weight, bias = self._inputs[0], self._weights[0], self._bias
        chunk = self._chunk_rows(of_weight=needed[2])
        logits = hidden.new_empty(chunk, weight.shape[0])
        losses = hidden.new_empty(len(hidden), dtype=self.dtype)
        of_bias = torch.zeros_like(bias, dtype=self.dtype) if bias is not None and needed[0] else None
        of_inputs = [
            torch.empty_like(each) if one else None
            for each, one in zip(self._inputs, needed[1::2], strict=True)
        ]
        of_weights = [
            _sum_blocks(each, self.dtype, is_written=len(hidden) > 0) if one else None
            for each, one in zip(self._weights, needed[2::2], strict=True)
        ]
        for start in range(0, len(hidden), chunk):
            rows = slice(start, min(start + chunk, len(hidden)))
            values = logits[: rows.stop - start]
            self._compute_logits(rows, values)
            losses[rows] = self._losses(values, labels[rows], factors[rows] if any(needed) else None)
            for inputs, of_input, of_weight, each in zip(
                self._inputs, of_inputs, of_weights, self._weights, strict=True
            ):
                if of_input is not None:
                    torch.mm(values, each, out=of_input[rows])
                if of_weight is not None:
                    _add_product(of_weight, values.T, inputs[rows], is_first=start == 0)
            if of_bias is not None:
                of_bias += values.sum(0, dtype=self.dtype)
        for of_input in of_inputs:
            if of_input is not None:
                self._vocabulary.all_reduce(of_input)
        found: list[_Blocks | None] = [None if of_bias is None else [of_bias]]
        for of_input, of_weight in zip(of_inputs, of_weights, strict=True):
            found += [None if of_input is None else [of_input], of_weight]
        return losses, tuple(found)

    def _compute_logits(self, rows: slice, logits: Tensor) -> None:
        """Compute the logits of the tokens ``rows``."""
        inputs, weight = self._inputs[0][rows], self._weights[0]
        if self._bias is None:
            torch.mm(inputs, weight.T, out=logits)
        else:
            torch.addmm(self._bias, inputs, weight.T, out=logits)
        for each, factors in zip(self._inputs[1:], self._weights[1:], strict=True):
            logits.addmm_(each[rows], factors.T)

    def _chunk_rows(self, of_weight: bool) -> int:
        """Return the tokens of a chunk, the same on all ranks. All chunks are equal, up to rounding."""
        hidden, weight = self._inputs[0], self._weights[0]
        tokens, words, chunk = len(hidden), self._vocabulary.largest, self._options.chunk_tokens
        if chunk == "auto":
            # Copies in a wider dtype are made of all logits of a chunk: by torch's softmax, and by gemm on a
            # CPU that does not multiply in bfloat16.
            copies = (weight.dtype != self.dtype and not _has_narrow_products(weight)) * self.dtype.itemsize
            if self._options.softcap is not None and self._softmax is TorchSoftmax:
                copies += self.dtype.itemsize  # the slope of the softcap
            inputs = weight.shape[1] * self.dtype.itemsize if of_weight and copies else 0
            nbytes = words * (weight.itemsize + copies) + inputs
            # The sum of the weight's gradient needs more than the gradient does. Where that is most of the
            # budget, smaller chunks would not keep to it, but read and write the sum more often.
            wider = words * weight.shape[1] * (self.dtype.itemsize - weight.itemsize) if of_weight else 0
            budget = CHUNK_BYTES - wider if wider <= CHUNK_BYTES // 2 else CHUNK_BYTES
            chunk = (budget - _PRODUCT_BYTES) // max(1, nbytes)
        number = -(-tokens // max(1, chunk))
        return max(1, -(-tokens // max(1, number)))

    def _losses(self, logits: Tensor, labels: Tensor, factors: Tensor | None) -> Tensor:
        """Return the losses of tokens [n] with ``logits`` [n, words], and replace logits by their gradient,
        times ``factors``, unless these are None."""
        options, vocabulary, size = self._options, self._vocabulary, self._vocabulary.size
        smoothing = options.label_smoothing
        softmax = self._softmax(logits, labels - vocabulary.first, options.softcap, factors is not None)
        largest = softmax.largest()
        vocabulary.all_reduce(largest, dist.ReduceOp.MAX)
        sums = softmax.sums(largest)
        vocabulary.all_reduce(sums)
        logarithm = sums[0].log()
        normalizer = logarithm + largest
        losses = logarithm - (1 - smoothing) * sums[1]
        if smoothing:  # not times 0, since the sum is infinite with words that cannot occur
            losses -= smoothing / size * sums[2]
        if factors is not None:
            # By the largest logit: the normalizer is rounded, which would be an error of all gradients.
            scale = factors * (1 + 2 * options.z_loss * normalizer) / sums[0]
            uniform, target = smoothing / size * factors, (1 - smoothing) * factors
            softmax.write_gradient(torch.stack([largest, scale, uniform, target]))
        return losses + options.z_loss * normalizer.square()


def _sum_blocks(weight: Tensor, dtype: torch.dtype, is_written: bool) -> _Blocks:
    """Return what sums the gradient of ``weight`` [words, width] in ``dtype``. A sum in another dtype than
    the weight's is in blocks, which are freed one by one when that gradient is made of them."""
    rows = len(weight)
    if dtype != weight.dtype:
        rows = max(1, _SUM_BLOCK_BYTES // max(1, weight.shape[1] * dtype.itemsize))
    make = torch.empty_like if is_written else torch.zeros_like
    return [make(each, dtype=dtype) for each in weight.split(max(1, rows))]


def _joined(blocks: _Blocks, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return the rows of ``blocks``, times ``scale`` [] if any, in ``dtype``. The list is empty then."""
    if len(blocks) == 1 and blocks[0].dtype == dtype:
        found = blocks.pop()
        return found if scale is None else _scale_into(found, found, scale)
    found = blocks[0].new_empty(sum(map(len, blocks)), *blocks[0].shape[1:], dtype=dtype)
    targets = list(found.split([len(block) for block in blocks]))
    while blocks:
        target, block = targets.pop(), blocks.pop()
        target.copy_(block) if scale is None else _scale_into(target, block, scale)
    return found


def _scale_into(target: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Write ``values`` times ``scale`` [] to ``target``, which may be the same, and return it. A device would
    round the scale to a narrower dtype of the values first."""
    rows = max(1, _PRODUCT_BYTES // max(1, values[:1].numel() * scale.itemsize))
    scratch = None if values.dtype == scale.dtype else torch.empty_like(values[:rows], dtype=scale.dtype)
    for block, result in zip(values.split(rows), target.split(rows), strict=True):
        wide = block if scratch is None else scratch[: len(block)].copy_(block)
        result.copy_(wide.mul_(scale))
    return target


def _has_narrow_products(tensor: Tensor) -> bool:
    """Return whether a CPU multiplies matrices of the dtype of ``tensor`` without copies in a wider one."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu and torch.cpu._is_avx512_bf16_supported()


def _add_product(total: _Blocks, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Add ``left @ right`` to ``total``, which may be of a wider dtype. The first product replaces it."""
    dtype = total[0].dtype
    if dtype == right.dtype:
        total[0].addmm_(left, right, beta=0 if is_first else 1)
        return
    # On a CPU, torch's products have the dtype of their factors. In bfloat16 they need less than half of
    # float32's time, and the sum over a chunk is rounded once. In float16 such a sum may overflow.
    is_widened = right.is_cpu and not _has_narrow_products(right)
    wide = right.to(dtype) if is_widened else right
    # Rows of the left side are copied for products in float32 on a CPU, those of the product otherwise.
    rows = max(1, _PRODUCT_BYTES // max(1, sum(right.shape) * dtype.itemsize))
    blocks = [block for each in total for block in each.split(rows)]
    for block, factor in zip(blocks, left.split([len(block) for block in blocks]), strict=True):
        if is_widened:
            block.addmm_(factor.to(dtype), wide, beta=0 if is_first else 1)
            continue
        product = torch.mm(factor, right) if right.is_cpu else torch.mm(factor, right, out_dtype=dtype)
        if is_first:
            block.copy_(product)
        else:
            block.add_(product)
        del product  # before the next one is allocated
