"""The configuration's `sparse_attention` put into a model that is being prepared."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from zero_ext.config import ConfigError, SparseAttentionConfig
from zero_ext.config.config_errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply_sparse_attention(model: nn.Module, policy: SparseAttentionConfig) -> None:
    """Make attention sparse in all Hugging Face models in `model`; where it is sparse already, it stays.

    Raises:
        ConfigError: one of them cannot take the policy, there is none, or what is there follows another one;
            or the model is cut into stages. Nothing has been changed then.
    """
    staged = sys.modules.get(
        "zero_ext.parallel.pipeline.stages.hf_pipeline"
    )  # there is none of its models otherwise
    if staged is not None and isinstance(model, staged.HfPipelineModule):
        raise ConfigError(
            Problem(
                "sparse_attention",
                "the model is cut into pipeline stages, and some may have no attention. Leave the section "
                "out, "
                "and call sparsify_attention(model, ...) before apply_pipeline_parallel.",
            )
        )
    from zero_ext.attention import SparseSelfAttention

    there = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    for module in there:
        if module.policy is not None and module.policy not in (policy, policy.in_a_model()):
            raise ConfigError(
                Problem(
                    "sparse_attention",
                    f"the configuration has {policy}, but the model has SparseSelfAttention with "
                    f"{module.policy}. Make them agree, or leave the section out.",
                )
            )
    if there:
        return
    found = outermost_models(model)
    if not found:
        raise ConfigError(
            Problem(
                "sparse_attention",
                f"{type(model).__name__} is no model of transformers and has no SparseSelfAttention. Call "
                "zero_ext.attention.SparseSelfAttention(config.sparse_attention) in its attention, or leave "
                "the section out.",
            )
        )
    from zero_ext.integrations.transformers.attention_interface import (
        exchange_attention,
        exchangeable_attention,
    )
    from zero_ext.integrations.transformers.config_copy import own_configurations

    for path, each in found.items():
        try:
            exchangeable_attention(each)
        except ValueError as error:
            where = f"module '{path}': " if path else ""
            raise ConfigError(
                Problem("sparse_attention", f"{where}{error} Or leave the section out.")
            ) from error
    own_configurations(model)  # of all at once: what is around them holds them too
    for each in found.values():
        exchange_attention(each, SparseSelfAttention(policy.in_a_model()))


def outermost_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """By path, the models of transformers that are in no other one."""
    if "transformers" not in sys.modules:  # a model of it cannot be there otherwise
        return {}
    from transformers import PreTrainedModel

    found: dict[str, PreTrainedModel] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            found[path] = module
            inside.update(module.modules())
    return found
