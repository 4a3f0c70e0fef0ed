"""Block-sparse attention: work and memory go with the blocks of the layout, not with length squared."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Unpack

from zero_ext.ops.load_library import autograd_formula, check_one_device, fake_kernel, op

FORWARD = "block_sparse_attention_forward"
BACKWARD = "block_sparse_attention_backward"

_BIAS = 8  # place of the bias among the arguments of the forward op
_TENSORS = 9  # its tensors come first


class LayoutTensors(NamedTuple):
    """A layout of blocks in compressed rows, int32, on the device of the query.

    ``row_pointers`` [layout heads, row blocks + 1] holds offsets into ``columns`` [blocks]: head h sees, from
    row block r, the column blocks ``columns[row_pointers[h, r] : row_pointers[h, r + 1]]``, which ascend.
    ``column_pointers`` [layout heads, column blocks + 1] and ``rows`` [blocks] are the same blocks by column;
    the backward on CUDA devices needs them, the CPU does not read them. Lists are checked for indices out of
    bounds or order, on CUDA devices also for heads with lists that overlap. There a bad layout gives zeros,
    and :func:`~zero_ext.ops.raise_device_errors` raises it. Lists by column are trusted to be the same
    blocks: others give wrong gradients of keys and values. Layout heads is 1 (all alike) or the number of
    query heads.
    """

    row_pointers: Tensor
    columns: Tensor
    column_pointers: Tensor | None = None
    rows: Tensor | None = None


class DropoutOptions(TypedDict, total=False):
    """Probability that a weight is dropped, and what its random numbers depend on."""

    dropout: float
    seed: int
    offset: int


class AttentionOptions(DropoutOptions, total=False):
    """Options of :func:`block_sparse_attention` besides its tensors and the block; each may be left out."""

    causal: bool
    scale: float | None
    key_padding: Tensor | None
    bias: Tensor | None


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_pointers: Tensor,
    columns: Tensor,
    column_pointers: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    block: int,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """softmax(scale * query key^T + bias) value over the blocks of a layout, without ever making the whole.

    Differentiable, once, by backward, in query, key, value and bias; the bias's gradient is computed only if
    it is asked for. Forward-mode differentiation and the derivatives of torch.func are refused. A query that
    sees no key gives zeros, and zeros as gradients. Softmax and sums run in float32. On one device the result
    is the same bits for any number of threads.

    Within the blocks of the layout, values of hidden keys may be multiplied by zero and not left out: one
    that is NaN or infinite then gives NaN, as it does in the math backend of torch's
    scaled_dot_product_attention.

    Memory in bytes besides the inputs: the output and 4 for each query and query head; in backward the
    gradients, and for each thread at most 8 * key length * head dim (rounded up to 16) and a few tiles of 64
    by 64 or 64 by head dim. A bias that needs a gradient adds its size in float32.

    Args:
        query: [batch, query heads, query length, head dim], float32, bfloat16 or float16; head dim a multiple
            of 8 from 16 to 256.
        key: [batch, key heads, key length, head dim]; key heads divides query heads, and query head h reads
            key head h // (query heads // key heads).
        value: of key's shape.
        row_pointers, columns, column_pointers, rows: the layout, see :class:`LayoutTensors`.
        block: tokens of a block, 16, 32, 64 or 128. The last row and column of blocks may be shorter.
        **options: of :class:`AttentionOptions`.
            ``causal`` (False): query i sees key j only if j <= i + key length - query length.
            ``scale`` (None): 1 / sqrt(head dim) if None.
            ``key_padding`` (None): bool [batch, key length], true where a key may be seen.
            ``bias`` (None): float32, bfloat16 or float16,
            [batch | 1, query heads | 1, query length | 1, key length | 1], of any strides; added to the
            scaled scores. Minus infinity hides a key.
            ``dropout`` (0): the probability that a weight is dropped, the others being divided by one minus
            it; ``seed`` and ``offset`` (0, 0): with batch, head, query and key the choice is a
            function: the same on every device and for every block size.

    Returns:
        [batch, query heads, query length, head dim], of query's dtype.

    Raises:
        TypeError: an unknown keyword.
        RuntimeError: an argument has the wrong dtype, device, shape or value; the layout is not one of these
            lengths; forward-mode or torch.func differentiation is asked for.

    Source: Dao, "FlashAttention-2" (arXiv 2307.08691), sections 3.1 and 3.2, over the blocks of Child et al.,
    "Generating long sequences with sparse transformers" (arXiv 1904.10509), section 5.5.
    """
    unknown = options.keys() - AttentionOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            "block_sparse_attention: expected keywords among "
            f"{', '.join(AttentionOptions.__annotations__)}, got {min(unknown)!r}. Remove it."
        )
    scale, padding, bias = options.get("scale"), options.get("key_padding"), options.get("bias")
    _refuse_other_derivatives(query, key, value, bias)
    settings: list[Any] = [
        block,
        options.get("causal", False),
        _default_scale(query) if scale is None else scale,
        float(options.get("dropout", 0.0)),
        options.get("seed", 0),
        options.get("offset", 0),
    ]
    tokens = [_with_unit_stride(each) for each in (query, key, value)]
    layout = LayoutTensors(row_pointers, columns, column_pointers, rows)
    masks = (None if padding is None else _with_unit_stride(padding), bias)
    return _call(FORWARD, *tokens, *layout, *masks, *settings)[0]


def _refuse_other_derivatives(*tensors: Tensor | None) -> None:
    """Without a formula for them the op would drop tangents without a word, or fail in torch's own terms."""
    present = [each for each in tensors if each is not None]
    dual = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(each).tangent is not None for each in present
    )
    if dual or (not torch.compiler.is_compiling() and any(map(_is_differentiated_by_func, present))):
        raise RuntimeError(
            "block_sparse_attention: it has no forward-mode derivative (torch.autograd.forward_ad, "
            "torch.func.jvp, jacfwd, hessian) and none by torch.func (grad, vjp, jacrev). Call backward or "
            "torch.autograd.grad, or use torch.nn.functional.scaled_dot_product_attention with its math "
            "backend."
        )


def _is_differentiated_by_func(tensor: Tensor) -> bool:
    """Return whether a transform of torch.func that differentiates has wrapped it, within vmap too."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _call(name: str, *arguments: Any) -> Any:
    # A graph that is being traced takes the op itself; looking it up loads the module.
    if torch.compiler.is_compiling():
        return getattr(torch.ops.zero_ext, name).default(*arguments)
    return op(name)(*arguments)


def _default_scale(query: Tensor) -> float:
    # Without a head dim any will do: the op refuses such a query by name.
    return 1 / math.sqrt(query.size(-1)) if query.dim() > 0 and query.size(-1) > 0 else 1.0


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


@fake_kernel(FORWARD)
def _forward(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = [each for each in arguments[: _TENSORS - 1] if each is not None]
    check_one_device(FORWARD, [query, *tensors])
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:3], dtype=torch.float32
    )


@fake_kernel(BACKWARD)
def _backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    check_one_device(BACKWARD, [grad_output, query, key, value, *tensors])
    *_, bias, _block, _causal, _scale, _dropout, _seed, _offset, need_grad_bias = arguments
    like_bias = query.new_empty(0)
    if need_grad_bias:
        like_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    gradients = [
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)
    ]
    return (*gradients, like_bias)  # type: ignore[return-value]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _gradients(context: Any, grad_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *layout_and_masks, output, logsumexp = context.saved_tensors
    wants_bias = context.needs_input_grad[_BIAS]
    grad_query, grad_key, grad_value, grad_bias = getattr(torch.ops.zero_ext, BACKWARD).default(
        _with_unit_stride(grad_output),
        query,
        key,
        value,
        output,
        logsumexp,
        *layout_and_masks,
        *context.options,
        wants_bias,
    )
    unused = (None,) * (_BIAS - 3)
    return (
        grad_query,
        grad_key,
        grad_value,
        *unused,
        grad_bias if wants_bias else None,
        *(None for _ in context.options),
    )


def _refuse_second_derivative(context: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError(
        "block_sparse_attention: it has no second derivative. Call backward without create_graph, or use "
        "torch.nn.functional.scaled_dot_product_attention with its math backend."
    )


autograd_formula(FORWARD, _gradients, _save_for_backward)
autograd_formula(BACKWARD, _refuse_second_derivative, None)
