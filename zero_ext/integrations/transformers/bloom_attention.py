"""BLOOM's attention, ALiBi included, over the blocks of a layout."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BloomConfig, BloomPreTrainedModel, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from zero_ext.attention import SparseSelfAttention

# Has masks alone in transformers' registries: so no model can be built with it, of a sparse one's
# configuration, that would take these masks for those of its own attention.
ALIBI_NAME = "zero_ext_sparse_alibi"


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
            return super().forward(
                hidden_states,
                residual,
                alibi,
                attention_mask,
                layer_past=layer_past,
                use_cache=use_cache,
                output_attentions=output_attentions,
                **kwargs,
            )
        if output_attentions:
            raise ValueError(
                "output_attentions: expected False, got True: sparse attention never stores the weights. Set "
                "it to False."
            )
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


def exchangeable_bloom(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the attention modules of BLOOM in `model`; changes nothing.

    Raises ValueError where one is in no model of BLOOM, or adds its output up in slices.
    """
    name = type(model).__name__
    attentions = [module for module in model.modules() if isinstance(module, BloomAttention)]
    owned = {module for owner in _owners(model) for module in owner.modules()}
    if not owned.issuperset(attentions):
        raise ValueError(
            f"{name}: expected BloomAttention inside a BloomModel, which makes its masks, got some "
            "outside. Pass "
            "the BloomModel."
        )
    if any(module.pretraining_tp > 1 and module.slow_but_exact for module in attentions):
        raise ValueError(
            f"{name}: expected slow_but_exact = False, got True with pretraining_tp = "
            f"{attentions[0].pretraining_tp}. Set slow_but_exact to False in its configuration."
        )
    return list(attentions)


def exchange_bloom(model: PreTrainedModel) -> None:
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


def _yes() -> bool:
    return True
