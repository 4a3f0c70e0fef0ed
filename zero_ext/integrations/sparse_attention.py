"""The configuration's `sparse_attention` put into a model that is being prepared."""

from __future__ import annotations

import sys

from torch import nn

from zero_ext.config import ConfigError, SparseAttentionPolicy
from zero_ext.config.errors import Problem


def apply_sparse_attention(model: nn.Module, policy: SparseAttentionPolicy) -> None:
    """Makes the attention of Hugging Face models in `model` sparse; attention that is sparse already stays.

    Raises:
        ConfigError: nothing in the model can take the policy, or what is there follows another one.
    """
    from zero_ext.attention import SparseSelfAttention

    there = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    for module in there:
        if module.policy is not None and module.policy != policy:
            raise ConfigError(
                Problem(
                    "sparse_attention",
                    f"the configuration says {policy}, but the model has SparseSelfAttention with "
                    f"{module.policy}; make them agree, or leave the section out",
                )
            )
    if there:
        return
    found = []
    if "transformers" in sys.modules:  # a model of it cannot be there otherwise
        from transformers import PreTrainedModel

        found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise ConfigError(
            Problem(
                "sparse_attention",
                f"{type(model).__name__} is no model of transformers and has no SparseSelfAttention; call "
                "zero_ext.attention.SparseSelfAttention(config.sparse_attention) in its attention, or leave "
                "the section out",
            )
        )
    from zero_ext.integrations.transformers.attention import sparsify_attention

    sparsify_attention(found[0], policy)
