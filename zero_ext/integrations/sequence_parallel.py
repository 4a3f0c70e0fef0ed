"""Models with sequences sharded over ranks: those of transformers, and sparse attention in any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.integrations.adapter_checks import refuse_activated_adapters
from zero_ext.integrations.prepare_with_features import outermost_models

if TYPE_CHECKING:
    from zero_ext.attention import SparseSelfAttention
    from zero_ext.parallel.ulysses import SequenceExchange


def apply_sequence_parallel(
    model: nn.Module, mesh: DeviceMesh, *, ring: int = 1, timeout_seconds: float = 600.0
) -> SequenceExchange:
    """Exchange sequences for heads over mesh["cp"] around all attention of `model`, in place; a collective.

    It acts on all models of transformers in it that look their attention up in transformers' registry, and on
    all [`SparseSelfAttention`][zero_ext.attention.SparseSelfAttention]. Afterwards each rank gives the model
    its slice of the tokens, as [`shard_batch`][zero_ext.parallel.shard_batch] cuts them. Call it after
    attention was made sparse and tensors were split, before [`prepare`][zero_ext.prepare].

    With `ring` over 1, `ring` ranks rotate keys and values around dense attention (ring attention), and
    groups of cp / ring ranks exchange heads. Documents of packed rows are supported then, and without a ring
    after [`apply_document_attention`][zero_ext.integrations.transformers.apply_document_attention].

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509), section 3; Liu et al., "Ring Attention"
    (arXiv 2310.01889).

    Args:
        model: the model, not prepared yet.
        mesh: has the dimension "cp".
        ring: number of ranks in a ring, a divisor of cp; give it to `shard_batch` too.
        timeout_seconds: longest wait for the other ranks.

    Returns:
        The exchange that all layers share. Its `traffic` counts.

    Raises:
        ValueError: a mesh without "cp", a ring that does not divide it, sparse attention or windows with a
            ring, a model with neither or with its sequences over ranks already, and
            layouts that differ from head to head; models of transformers with cross-attention, several
            configurations (vision and text), a head that may look at several tokens, layers that mix tokens
            in other ways, no `position_ids`, attention "eager", or heads that do not divide by cp / ring and
            tp; adapters that begin at some token of a row (aLoRA).
            Nothing was changed.
    """
    from zero_ext.attention import SparseSelfAttention
    from zero_ext.parallel.ulysses import SequenceAttention, SequenceExchange, check_ring, sequence_rank

    check_ring(ring, sequence_rank(mesh)[1])
    found = outermost_models(model)
    served = {module for each in found.values() for module in each.modules()}
    sparse = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    own = [module for module in sparse if module not in served]
    name = type(model).__name__
    if not (found or own):
        raise ValueError(
            f"{name}: expected a model of transformers or one with SparseSelfAttention, got neither. Put "
            "zero_ext.parallel.sequence_attention around its attention function."
        )
    if any("forward" in vars(module) for module in own):
        raise ValueError(f"{name}: its sequences are sharded already. Call apply_sequence_parallel once.")
    if sparse and ring > 1:
        raise ValueError(f"{name}: expected dense attention with a ring, got a sparse layout. Pass ring=1.")
    for module in sparse:
        _check_layouts(module)
    refuse_activated_adapters(model)
    if found:
        from zero_ext.integrations.transformers.attention_interface import own_configurations
        from zero_ext.integrations.transformers.sequence_interface import (
            check_sequences,
            exchange_sequences,
            refuse_documents,
        )

        for each in found.values():
            check_sequences(each, mesh, ring)
    exchange = SequenceExchange(mesh, timeout_seconds, ring=ring)
    if exchange.size == 1:
        for each in found.values():
            refuse_documents(each)
        return exchange
    if found:
        own_configurations(model)  # of all at once: what is around them holds them too
    for each in found.values():
        exchange_sequences(each, exchange)
    for module in own:
        module.__dict__["forward"] = SequenceAttention(module.forward, exchange)
    return exchange


def _check_layouts(module: SparseSelfAttention) -> None:
    if module.layout is not None:
        layouts = module.layout.heads
    else:
        layouts = 1 if module.policy is None else module.policy.layout_heads(2)
    if layouts > 1:
        raise ValueError(
            f"SparseSelfAttention: expected one layout for all heads, got {layouts}: a rank has only some of "
            "the heads. Set different_layout_per_head to false, or pass a layout of one head."
        )
