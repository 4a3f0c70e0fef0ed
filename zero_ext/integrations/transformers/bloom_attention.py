"""BLOOM's attention, ALiBi included, over the blocks of a layout."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from zero_ext.attention import SparseSelfAttention


class SparseBloomAttention(BloomAttention):
    """A BloomAttention whose `sparse_attention` attends; made by `sparsify_attention`, never built.

    ALiBi (Press et al., arXiv 2108.12409) is a bias of [batch, heads, 1, key length].
    """

    sparse_attention: SparseSelfAttention

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
        if output_attentions:
            raise ValueError("output_attentions is true, but sparse attention never has the weights")
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
