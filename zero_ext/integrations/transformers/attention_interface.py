"""Sparse attention in Hugging Face models: through transformers' registry, in BLOOM's in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import BloomConfig, BloomPreTrainedModel, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from zero_ext.attention import BlockLayout, SparseSelfAttention, extend_positions
from zero_ext.attention.packed_documents import restarts
from zero_ext.config import SparseAttentionConfig
from zero_ext.config.sparse_attention import AttentionBackend

NAME = "zero_ext_sparse"
# Has masks alone in transformers' registries: so no model can be built with it, of a sparse one's
# configuration, that would take these masks for those of its own attention.
ALIBI_NAME = "zero_ext_sparse_alibi"
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "head_mask")
_LEARNT_POSITIONS = ("position_embeddings", "wpe")


def sparsify_attention(
    model: PreTrainedModel,
    config: SparseAttentionConfig | Mapping[str, Any] | BlockLayout,
    backend: AttentionBackend | None = None,
) -> SparseSelfAttention:
    """Make all self-attention of a model sparse, in place; parameters and state_dict keys stay.

    The model gets configuration objects of its own, so that others that share them stay as they are.
    `model.set_attn_implementation("eager")` makes it dense again. What `save_pretrained` writes does not
    say that attention was sparse.

    Models that look their attention up in transformers' registry (BERT, RoBERTa, GPT-2, Llama, T5's encoder
    and most others) find it there; BLOOM's attention modules, which add ALiBi, are changed in place. Masks of
    length × length are no longer made: an attention mask that came as [batch, length] stays that small. A
    token of padding attends as any other, and no other attends to it.

    Generation with a cache of keys gives each token what a forward of the whole sequence gives it where the
    layout is unidirectional; under a bidirectional one, made causal by the model, its blocks at or before the
    token. Caches of fixed size are refused, since their length is not that of the tokens.

    Args:
        model: any PreTrainedModel, before `prepare` or after.
        config: a policy, a mapping of its keys, or a layout for one length; of as many heads as the model's,
            where heads differ.
        backend: as of `SparseSelfAttention`. With "flex", attention that drops weights in training, or that
            learns a bias of its scores (T5), is refused at its first forward.

    Returns:
        The attention that all layers share.

    Raises:
        TypeError: `config` is none of these.
        ValueError: the model has cross-attention, no attention that may be exchanged, or fewer than all; or
            `backend` does not take the layout.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from zero_ext.integrations.transformers import sparsify_attention
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        >>> sparse = sparsify_attention(model, {"mode": "fixed", "block": 16, "attention": "unidirectional"})
        >>> model(torch.zeros(1, 64, dtype=torch.int64)).logits.shape
        torch.Size([1, 64, 50])
    """
    sparse = SparseSelfAttention(config, backend)  # which refuses what is wrong before anything has changed
    if sparse.policy is not None:
        sparse = SparseSelfAttention(sparse.policy.in_a_model())
    exchangeable_attention(model)
    own_configurations(model)
    exchange_attention(model, sparse)
    return sparse


def own_configurations(model: torch.nn.Module) -> None:
    """Give `model` copies of the configurations its modules hold, so that changes reach no other model.

    Modules that shared an object share its copy, and a configuration within another one stays there.
    """
    copied: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copied))


def exchange_attention(model: PreTrainedModel, sparse: SparseSelfAttention) -> None:
    """Have all layers of a model attend by `sparse`. No other model may hold its configuration."""
    attentions, blooms = exchangeable_attention(model)
    if attentions:
        model.set_attn_implementation(NAME)
    _exchange_bloom(model)
    # A caller may use the base model alone, and adapters call the forward of the outer model past its hooks.
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each.register_forward_pre_hook(_refuse_documents, with_kwargs=True)
    for module in (*attentions, *blooms):
        module.sparse_attention = sparse


def _refuse_documents(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for packed rows, as no layout keeps documents apart.

    transformers looks for packed rows only where there is neither a mask nor a cache.
    """
    if model.config._attn_implementation not in (NAME, ALIBI_NAME):
        return
    inputs = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None or positions.ndim != 2 or (mask is not None and mask.ndim != 2):
        return
    if mask is not None:
        mask = mask[:, -positions.shape[1] :]
        positions = positions.expand(mask.shape)
    if bool(restarts(positions, mask).any()):
        raise ValueError(
            f"{type(model).__name__}: expected one sequence per row under sparse attention, got position_ids "
            "that begin anew. Pass one sequence per row, or call apply_document_attention on a dense model."
        )


def exchangeable_attention(
    model: PreTrainedModel,
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return the attention modules that ask transformers' registry, and those of BLOOM; changes nothing.

    Raises ValueError where `sparsify_attention` does.
    """
    attentions, blooms = registry_attentions(model), _exchangeable_bloom(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or any(map(is_cross, attentions)):
        raise ValueError(
            f"{name}: expected self-attention only, got cross-attention, which a layout does not cover. Pass "
            "its encoder or decoder alone."
        )
    if not (attentions or blooms):
        raise ValueError(
            f"{name}: expected attention from transformers' registry, got none. Call SparseSelfAttention "
            "in it."
        )
    if attentions:
        if any(hasattr(module, "sequence_exchange") for module in attentions):
            raise ValueError(
                f"{name}: its sequences are sharded already. Make its attention sparse first, then call "
                "apply_sequence_parallel."
            )
        check_full_attention(model)
    return attentions, blooms


def registry_attentions(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the attention modules that ask transformers' registry."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "is_causal")
        and hasattr(module, "config")
        and not isinstance(module, PreTrainedModel)
    ]


def is_cross(module: torch.nn.Module) -> bool:
    """Return whether a module attends to the tokens of another sequence."""
    return getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__


def check_full_attention(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` unless all layers attend to the full sequence, through the registry."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{name}: expected attention from transformers' registry, got its own. Call "
            "SparseSelfAttention in it."
        )
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    window = getattr(model.config, "sliding_window", None)
    if kinds != {"full_attention"} or window:
        raise ValueError(
            f"{name}: expected full attention in all layers, got {', '.join(sorted(kinds))} and window "
            f"{window}. Set them to full attention in its configuration."
        )


def _exchangeable_bloom(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return BLOOM's attention modules; ValueError where one is in no BloomModel, or adds up in slices."""
    name = type(model).__name__
    attentions = [module for module in model.modules() if isinstance(module, BloomAttention)]
    owned = {module for owner in _owners(model) for module in owner.modules()}
    if not owned.issuperset(attentions):
        raise ValueError(
            f"{name}: expected BloomAttention inside a BloomModel, which makes its masks, got some outside. "
            "Pass the BloomModel."
        )
    if any(module.pretraining_tp > 1 and module.slow_but_exact for module in attentions):
        raise ValueError(
            f"{name}: expected slow_but_exact = False, got True with pretraining_tp = "
            f"{attentions[0].pretraining_tp}. Set slow_but_exact to False in its configuration."
        )
    return list(attentions)


def _exchange_bloom(model: PreTrainedModel) -> None:
    """Make the attention of BLOOM's models in `model` look for a `sparse_attention`, masks small."""
    for owner in _owners(model):
        owner.config._attn_implementation_internal = ALIBI_NAME
        # The class says no, as its attention does not look at the configuration. Now it does.
        vars(owner)["_can_set_attn_implementation"] = _yes
        for module in owner.modules():
            if isinstance(module, BloomAttention):
                module.__class__ = SparseBloomAttention
                module.config = owner.config


def _owners(model: PreTrainedModel) -> list[BloomPreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, BloomPreTrainedModel)]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers calls: [batch, heads, length, head dim] in, [batch, length, heads, head dim]
    out.
    """
    sparse = getattr(module, "sparse_attention", None)
    if sparse is None:
        raise RuntimeError(
            f"{type(module).__name__}: its attention is {NAME!r}, but it has no layout. Call "
            "sparsify_attention(model, config)."
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: sparse attention does not support {name}. Use another attention "
                "here."
            )
    _refuse_weights(kwargs.get("output_attentions"))
    if attention_mask is not None and not (
        attention_mask.dtype == torch.bool or attention_mask.is_floating_point()
    ):
        raise TypeError(
            "attention_mask: expected torch.bool (True may be attended) or floats to add, got "
            f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}. Pass attention_mask.bool() "
            "where 1 means that it may be attended."
        )
    two = attention_mask is not None and attention_mask.ndim == 2
    width = value.shape[3]
    if width < query.shape[3]:  # latent attention, as of DeepSeek-V3
        value = F.pad(value, (0, query.shape[3] - width))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    found = sparse(
        query,
        key,
        value,
        None if two else attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        key_padding=attention_mask if two else None,
        bias=kwargs.get("position_bias"),
    )
    return found[..., :width].transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    **more: Any,
) -> torch.Tensor | None:
    """Return the padding of the keys, bool [batch, key length], or None; never a mask of length × length."""
    config: Any = more.get("config")
    if getattr(config, "model_type", None) == "bloom" and config._attn_implementation == NAME:
        raise RuntimeError(
            f"BloomModel: its attention is {NAME!r}, but it has no layout. Call sparsify_attention(model, "
            "config)."
        )
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "attention mask: expected a causal or bidirectional one, got the model's own (packed sequences, "
            "a window, or an overlay). Pass an attention_mask of [batch, length] and one sequence per row."
        )
    if mask_function is causal_mask_function and (kv_offset or int(q_offset) + q_length != kv_length):
        raise ValueError(
            f"cache: expected as many keys as queries up to {int(q_offset) + q_length}, got {kv_length} keys "
            f"from {kv_offset}, as of a cache of fixed size. Use a DynamicCache."
        )
    mask: torch.Tensor | None = more.get("attention_mask")
    if mask is None:
        return None
    if tuple(mask.shape) != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask: expected shape {(batch_size, kv_length)}, got {tuple(mask.shape)}. Pass one "
            "value per token."
        )
    return mask.bool()


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(ALIBI_NAME, _mask)


def _yes() -> bool:
    return True


def _refuse_weights(asked_for: Any) -> None:
    if asked_for:
        raise ValueError(
            "output_attentions: expected False, got True: sparse attention never stores the weights. Set it "
            "to False."
        )


class SparseBloomAttention(BloomAttention):
    """A BloomAttention that attends by its `sparse_attention`; made by `sparsify_attention`, never built.

    It is dense again where the model's configuration names another implementation.
    ALiBi (Press et al., arXiv 2108.12409) is a bias of [batch, heads, 1, key length].
    """

    sparse_attention: SparseSelfAttention
    config: BloomConfig

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As BloomAttention's; attention_mask is bool [batch, key length] or None.

        Raises ValueError for output_attentions, since the weights are never there.
        """
        if self.config._attn_implementation != ALIBI_NAME:
            kwargs |= {
                "layer_past": layer_past,
                "use_cache": use_cache,
                "output_attentions": output_attentions,
            }
            return super().forward(hidden_states, residual, alibi, attention_mask, **kwargs)
        _refuse_weights(output_attentions)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        batch, _, length, _ = query.shape
        two = attention_mask is not None and attention_mask.ndim == 2
        found = self.sparse_attention(
            query,
            key,
            value,
            None if two else attention_mask,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            is_causal=True,
            scale=self.inv_norm_factor,
            key_padding=attention_mask if two else None,
            bias=alibi.view(batch, self.num_heads, 1, -1),
        )
        output = self.dense(found.transpose(1, 2).reshape(batch, length, self.hidden_size))
        return dropout_add(output, residual, self.hidden_dropout, self.training), None


def extend_position_embedding(model: PreTrainedModel, positions: int) -> None:
    """Lengthen a model's learnt position embedding (BERT, RoBERTa, GPT-2) in place, its configuration too.

    Args:
        model: a model with one learnt position embedding.
        positions: tokens that it shall take; see `zero_ext.attention.extend_positions`.

    Raises:
        ValueError: it has none (rotary embeddings and ALiBi need no lengthening), or fewer are asked for.
    """
    owners = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if name in _LEARNT_POSITIONS and isinstance(child, torch.nn.Embedding)
    ]
    if not owners:
        raise ValueError(
            f"{type(model).__name__}: expected a learnt position embedding, got none. Use it as it is: it "
            "has no fixed length."
        )
    for module, _, embedding in owners:
        padding = getattr(embedding, "padding_idx", None)
        reserved = 0 if padding is None else padding + 1
        extend_positions(embedding, positions, reserved)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name == "position_ids":
                ids = torch.arange(embedding.num_embeddings, device=buffer.device)
                module.register_buffer(name, ids.expand((1, -1)).clone(), persistent=False)
            elif name == "token_type_ids":
                zeros = buffer.new_zeros(1, embedding.num_embeddings)
                module.register_buffer(name, zeros, persistent=False)
        model.config.max_position_embeddings = embedding.num_embeddings
