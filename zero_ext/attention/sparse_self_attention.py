"""The module that attends by a layout, and its masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict, get_args

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from typing_extensions import Unpack

from zero_ext.attention import flex_attention
from zero_ext.attention.block_layout import BlockLayout
from zero_ext.attention.layout_builder import LayoutCache
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.sparse_attention import AttentionBackend, SparseAttentionConfig
from zero_ext.ops.attention import block_sparse_attention

# Batch, query heads, query length, key length.
_Shape = tuple[int, int, int, int]
_NAMES = ("batch", "query heads", "query length", "key length")
LayoutSource = SparseAttentionConfig | Mapping[str, Any] | BlockLayout
_SEEDS = 1 << 62
_LEAST_DIM, _MOST_DIM = 16, 256  # of a head, in the kernels, in steps of 8


class MoreMasks(TypedDict, total=False):
    """Masks that scaled_dot_product_attention does not have; each may be left out."""

    key_padding: torch.Tensor | None
    bias: torch.Tensor | None


class SparseSelfAttention(torch.nn.Module):
    """`scaled_dot_product_attention` in which a query attends only to the keys of its blocks.

    Work and memory scale with the blocks of the layout. Layouts are built at the first call with a length and
    cached. The module has no parameters and no buffers. One may serve all layers of a model.

    Source: Child et al., "Generating long sequences with sparse transformers" (arXiv 1904.10509).

    Args:
        config: a policy, a mapping of its keys (DeepSpeed's `sparse_attention` section), or a layout of your
            own, which then serves its length alone.
        backend: "kernel" runs this package's kernels; "flex" torch's FlexAttention on devices, in tiles of
            128 tokens, without dropout and without the gradient of a bias. On the CPU torch computes all
            scores and has no backward. A model that is compiled whole breaks its graph at "flex". None is
            what the policy says, and "kernel" for a layout.

    Attributes:
        layout: the layout of your own; None for a policy.
        backend: "kernel" or "flex".

    Raises:
        TypeError: `config` is none of these.
        ConfigError: a key or value of the mapping is wrong.
        ValueError: `backend` is neither, or it is "flex" and the layout has too many tiles for it.

    Examples:
        >>> from zero_ext.attention import SparseSelfAttention
        >>> attention = SparseSelfAttention({"mode": "fixed", "block": 16, "attention": "unidirectional"})
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)  # [batch, heads, length, head dim] each
        >>> attention(query, key, value).shape
        torch.Size([1, 2, 64, 16])
    """

    def __init__(self, config: LayoutSource, backend: AttentionBackend | None = None) -> None:
        super().__init__()
        if not isinstance(config, SparseAttentionConfig | Mapping | BlockLayout):
            raise TypeError(
                "config: expected a SparseAttentionConfig, a mapping of its keys or a BlockLayout, got "
                f'{config!r}. Pass one of them, such as {{"mode": "fixed", "block": 64}}.'
            )
        if backend not in (None, *get_args(AttentionBackend)):
            raise ValueError(f'backend: expected "kernel" or "flex", got {backend!r}. Choose one of them.')
        policy = SparseAttentionConfig.from_mapping(config) if isinstance(config, Mapping) else config
        self.layout: BlockLayout | None = None
        self._cache: LayoutCache | None = None
        if isinstance(policy, BlockLayout):
            self.layout, self.backend = policy, backend or "kernel"
            if self.backend == "flex":
                flex_attention.check_tiles(policy)
            return
        if backend is not None:
            policy = policy.replace(backend=backend)
        self._cache, self.backend = LayoutCache(policy), policy.backend

    @property
    def policy(self) -> SparseAttentionConfig | None:
        """The policy that layouts are built by; None for a layout of your own."""
        return None if self._cache is None else self._cache.policy

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **more: Unpack[MoreMasks],
    ) -> torch.Tensor:
        """Attention over the layout's blocks; within them as in torch's function of the same arguments.

        Tensors on the device "meta" and those of a FakeTensorMode give tensors of their kind.

        A query that may attend to nothing gets zeros, where torch gives NaN, or the mean of the values if it
        is finfo.min that hides them: floats of -2.36e38 or less count as minus infinity. With fewer queries
        than keys, as when generating with a cache of keys, attention must be causal: the queries are the last
        tokens, and each gets what it would get in a forward of the whole sequence.

        Args:
            query: [batch, query heads, query length, head dim], float32, bfloat16 or float16; head dim
                at most 256; one below 16, or no multiple of 8, is padded with zeros to the next that is both.
            key: [batch, key heads, key length, head dim].
            value: [batch, key heads, key length, head dim].
            attn_mask: bool (True may be attended) or a float to add, broadcasting to
                [batch, query heads, query length, key length]. Only a mask that varies with query and key
                takes memory of their product: give padding as key_padding or [batch, 1, 1, key length].
            dropout_p: probability that a weight is dropped, whatever the mode of the module; drawn by torch's
                default generator.
            is_causal: attend to no later token; always so where the policy is unidirectional. With fewer
                queries than keys, query i is token i + key length - query length, as under
                `torch.nn.attention.bias.causal_lower_right`; torch's own is_causal takes it for token i.
            scale: of the scores, 1 / sqrt(head dim) by default.
            enable_gqa: allow fewer key heads than query heads, a divisor of them.
            **more: key_padding, bool [batch, key length], True where a key may be attended; and bias, added
                to the scaled scores as a float attn_mask is (both may be given), differentiable.

        Returns:
            [batch, query heads, query length, head dim], of query's dtype; under `torch.autocast`, of its
            dtype, which query, key and value are cast to first, as for torch's function.

        Raises:
            ValueError: shapes do not fit together, the layout is one for other lengths or heads, or the
                backend is "flex" and there is dropout or a bias that wants a gradient.
            TypeError: an unknown keyword, or a mask that is neither boolean nor floating.
            RuntimeError: what the kernel does not take: dtype, head dim, device.
        """
        query, key, value = autocast_tensors(query, key, value)
        scores_shape = _scores_shape(query, key, value, enable_gqa)
        key_padding, bias = _masks(attn_mask, more, scores_shape)
        if self.backend == "flex" and dropout_p > 0:
            raise ValueError(
                f'dropout_p: expected 0 for backend "flex", got {dropout_p}. Use backend "kernel".'
            )
        causal = is_causal or (self.policy is not None and self.policy.unidirectional)
        abstract = query.is_meta or isinstance(query, FakeTensor)
        layout = self._layout_for(scores_shape, causal, None if abstract else query.device)
        extra = layout.query_length - scores_shape[2]
        if extra:  # the rows of blocks begin before the first query
            query = F.pad(query, (0, 0, extra, 0))
            if bias is not None and bias.shape[2] > 1:
                bias = F.pad(bias, (0, 0, extra, 0))
        dim = query.shape[3]
        wide = max(_LEAST_DIM, dim + -dim % 8)
        if dim < wide <= _MOST_DIM:
            scale = 1 / math.sqrt(dim) if scale is None else scale
            query, key, value = (F.pad(each, (0, wide - dim)) for each in (query, key, value))
        if self.backend == "flex" and not abstract:
            found = flex_attention.attend(
                query, key, value, layout, causal=causal, scale=scale, key_padding=key_padding, bias=bias
            )
            return found[:, :, extra:, :dim]
        found = block_sparse_attention(
            query,
            key,
            value,
            *_layout_tensors(layout, query),
            block=layout.block,
            causal=causal,
            scale=scale,
            key_padding=key_padding,
            bias=bias,
            dropout=dropout_p,
            seed=int(torch.randint(_SEEDS, (), device="cpu")) if dropout_p > 0 else 0,
        )
        return found[:, :, extra:, :dim]

    def _layout_for(self, scores_shape: _Shape, causal: bool, device: torch.device | None) -> BlockLayout:
        """Return the layout on `device`; None for any, where its numbers are not looked at."""
        _, heads, queries, keys = scores_shape
        if self._cache is None:
            return self._own_layout(scores_shape, device)
        if queries == keys:
            return self._cache.get(heads, keys, causal=causal, device=device or "cpu")
        if queries > keys or not causal:
            raise ValueError(
                f"query: expected length {keys}, that of the keys, got {queries}. A layout is of tokens "
                "that attend to each other. Pass as many queries as keys, or the last of the tokens as "
                "queries with is_causal=True, or a BlockLayout of these lengths."
            )
        return self._cache.get(heads, keys, queries=queries, causal=True, device=device or "cpu")

    def _own_layout(self, scores_shape: _Shape, device: torch.device | None) -> BlockLayout:
        layout, (_, heads, queries, keys) = self.layout, scores_shape
        if layout is None:
            raise zero_ext_bug("neither policy nor layout")
        if (layout.query_length, layout.key_length) != (queries, keys):
            raise ValueError(
                f"layout: expected {layout.query_length} queries and {layout.key_length} keys, which it is "
                f"for, got {queries} and {keys}. Build one for this length, or pass a policy, which serves "
                "every length."
            )
        if layout.heads not in (1, heads):
            raise ValueError(
                f"layout: expected 1 head or {heads} heads, as the query has, got {layout.heads}. Build "
                f"one for all heads or for {heads}."
            )
        if device is not None and layout.device != device:
            layout = self.layout = layout.to(device)
        return layout

    def extra_repr(self) -> str:
        """Return the policy or layout and the backend as `repr` shows them.

        Returns:
            The text between the parentheses.
        """
        if self.layout is None:
            return str(self.policy)
        size = f"{self.layout.query_length} × {self.layout.key_length}"
        return f"layout of {size} tokens, {self.layout.blocks} blocks of {self.layout.block}"


def _layout_tensors(layout: BlockLayout, query: torch.Tensor) -> list[torch.Tensor]:
    """Return what the op wants of the layout, of query's kind."""
    by_rows = [layout.row_pointers, layout.columns]
    if isinstance(query, FakeTensor):
        mode = query.fake_mode
        if mode.allow_non_fake_inputs:  # as in torch.export, which takes them for constants
            return by_rows
        with mode:
            return [mode.from_tensor(each).to(query.device) for each in by_rows]
    if query.device.type in ("cpu", "meta"):
        return [each.to(query.device) for each in by_rows]
    return [*by_rows, layout.column_pointers, layout.rows]


def autocast_tensors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype where it is enabled for their device; float64 stays, as in
    torch.
    """
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


def _scores_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> _Shape:
    """Batch, query heads, query length, key length."""
    shapes = {name: tuple(each.shape) for name, each in (("query", query), ("key", key), ("value", value))}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(
                f"{name}: expected shape [batch, heads, length, head dim], got {shape}. Reshape it."
            )
    if shapes["key"] != shapes["value"]:
        raise ValueError(
            f"value: expected the shape of key, {shapes['key']}, got {shapes['value']}. Pass a value for "
            "each key."
        )
    (batch, heads, length, dim), (key_batch, key_heads, key_length, key_dim) = shapes["query"], shapes["key"]
    if (batch, dim) != (key_batch, key_dim):
        raise ValueError(
            f"key: expected the batch and head dim of query, shape {shapes['query']}, got "
            f"{shapes['key']}. Pass query and key of the same batch and projection."
        )
    if dim == 0:
        raise ValueError(
            f"query: expected a head dim of at least 1, got shape {shapes['query']}. Pass a query with a "
            "head dim."
        )
    if heads != key_heads and not grouped:
        raise ValueError(
            f"key: expected {heads} heads, as the query has, got {key_heads}. Pass enable_gqa=True if "
            "several query heads share one."
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"key: expected a number of heads that divides the {heads} of the query, got {key_heads}. Pass a "
            "divisor of them."
        )
    return batch, heads, length, key_length


def _masks(
    attn_mask: torch.Tensor | None, more: MoreMasks, scores_shape: _Shape
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return all masks as key padding and bias."""
    unknown = more.keys() - MoreMasks.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"SparseSelfAttention: expected keywords among {', '.join(MoreMasks.__annotations__)}, got "
            f"{min(unknown)!r}. Remove it."
        )
    key_padding, bias = _split_mask(attn_mask, scores_shape)
    own_padding, own_bias = more.get("key_padding"), more.get("bias")
    if own_padding is not None:
        wanted = (scores_shape[0], scores_shape[3])
        if own_padding.dtype != torch.bool or tuple(own_padding.shape) != wanted:
            raise ValueError(
                f"key_padding: expected torch.bool of shape {wanted}, True where a key may be attended, got "
                f"{own_padding.dtype} of shape {tuple(own_padding.shape)}. Convert it, or pass it as "
                "attn_mask."
            )
    if own_bias is not None:
        own_bias = _as_scores(own_bias, scores_shape, "bias")
        if own_bias.dtype == torch.bool:
            raise TypeError("bias: expected a float dtype, got torch.bool. Pass a boolean mask as attn_mask.")
    return _both(key_padding, own_padding), _both(bias, own_bias)


def _split_mask(
    attn_mask: torch.Tensor | None, scores_shape: _Shape
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what `attn_mask` says as (key padding, bias); None for what it does not say.

    A boolean mask (True may be attended) that depends on batch and key alone is key padding, bool
    [batch, key length]; every other becomes a float32 bias of its own shape with minus infinity where it is
    False. A mask of floats is the bias. Raises as `_as_scores` does.
    """
    if attn_mask is None:
        return None, None
    mask = _as_scores(attn_mask, scores_shape, "attn_mask")
    if mask.dtype != torch.bool:
        return None, mask
    if mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(scores_shape[0], scores_shape[3]), None
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return None, bias.masked_fill_(~mask, float("-inf"))


def _as_scores(tensor: torch.Tensor, scores_shape: _Shape, name: str) -> torch.Tensor:
    """`tensor` with 4 dims, each 1 or that of `scores_shape`; a view. ``TypeError`` if it is neither boolean
    nor floating, ``ValueError`` if its shape does not broadcast."""
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        raise TypeError(
            f"{name}: expected torch.bool (True may be attended) or a float to add, got {tensor.dtype}. "
            "Convert it, for example with .bool()."
        )
    shape = tuple(tensor.shape)
    wide = (1,) * (4 - len(shape)) + shape
    if len(wide) != 4 or any(size not in (1, full) for size, full in zip(wide, scores_shape, strict=True)):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to the scores {scores_shape} ({', '.join(_NAMES)}), "
            f"got {shape}. Pass key padding of [batch, key length] as key_padding."
        )
    return tensor.reshape(wide)


def _both(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Two boolean masks that both must allow, or two biases that add up; None adds nothing."""
    if first is None or second is None:
        return second if first is None else first
    return first & second if first.dtype == torch.bool else first + second
