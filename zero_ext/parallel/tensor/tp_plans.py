"""Tensor-parallel plans for models of transformers that ship none, and the names of styles in all plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from zero_ext.parallel.tensor.tp_styles import (
    ExpertsParallel,
    IdentityExpert,
    InputsParallel,
    LatentKeys,
    LocalHeads,
    LocalParameters,
    MultiQueryOutputs,
    OutputsParallel,
    VocabularyParallel,
    is_conv1d,
)

Make = Callable[[nn.Module, str], ParallelStyle]

# A style is made for the module of a name in a model, anew for every module.
_PROJECTIONS: dict[str, Make] = {
    "colwise": lambda model, name: (
        OutputsParallel() if is_conv1d(model.get_submodule(name)) else ColwiseParallel()
    ),
    "rowwise": lambda model, name: (
        InputsParallel() if _projects(model.get_submodule(name)) else RowwiseParallel()
    ),
    "colwise_halves": lambda model, name: OutputsParallel(2),
    "colwise_thirds": lambda model, name: OutputsParallel(3),
    "packed_colwise": lambda model, name: OutputsParallel(2),
}
_LINEAR: dict[str, Make] = {
    "colwise_gather_output": lambda model, name: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda model, name: ColwiseParallel(output_layouts=Replicate()),
    "colwise_split_logits": lambda model, name: ColwiseParallel(use_local_output=False),
    "colwise_multi_query": lambda model, name: MultiQueryOutputs(_parent(model, name).head_dim),
    "rowwise_split_input": lambda model, name: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda model, name: RowwiseParallel(input_layouts=Replicate()),
}
_EMBEDDINGS: dict[str, Make] = {
    "embedding_rowwise": lambda model, name: (
        RowwiseParallel(input_layouts=Replicate())
        if type(model.get_submodule(name)) is nn.Embedding
        else VocabularyParallel()
    ),
    "embedding_colwise": lambda model, name: ColwiseParallel(output_layouts=Replicate()),
    "embedding_heads": lambda model, name: ColwiseParallel(),
}
_ANY_MODULE: dict[str, Make] = {
    "local_heads": lambda model, name: LocalHeads(),
    "local_query_heads": lambda model, name: LocalHeads(shared_keys=True),
    "local_params": lambda model, name: LocalParameters(),
    "mla_kv_a_proj": lambda model, name: LatentKeys(_rotary(model, name) or 0),
    "moe_tp_experts": lambda model, name: ExpertsParallel(),
    "moe_identity_expert": lambda model, name: IdentityExpert(),
    "all_reduce": lambda model, name: ExpertsParallel(),
}
MODULE_STYLES = {**_PROJECTIONS, **_LINEAR, **_EMBEDDINGS, **_ANY_MODULE}
# Styles of parameters that a plan names themselves.
PARAMETER_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
# Replicated parameters that each rank uses on its own heads: their gradients are summed.
SUMMED = "replicated_with_grad_allreduce"
REPLICATED = "replicate"
# Styles with slices of equal size on all ranks, and of how many projections.
EVEN = {"colwise": 1, "rowwise": 1, "colwise_halves": 2, "colwise_thirds": 3, "packed_colwise": 2}
# Styles of experts, which need slices of their parameters.
EXPERTS = ("moe_tp_experts", "all_reduce")

_EXPERT_PARALLEL = (
    "it places experts on ranks. Split each expert by 'moe_tp_experts', 'packed_colwise' and 'rowwise', or "
    "build the model of zero_ext.parallel.experts.MixtureOfExperts"
)
_VERSION_4 = "it is one of transformers 4. Use 'colwise', 'rowwise', 'moe_tp_experts' or 'local_params'"
_REFUSED = {
    "sequence_parallel": "its neighbors' layouts must match. Give a plan with torch's SequenceParallel() "
    "and, around it, ColwiseParallel and RowwiseParallel with layouts Shard(1)",
    "grouped_gemm": _EXPERT_PARALLEL,
    "ep_dispatch_experts": _EXPERT_PARALLEL,
    "ep_router": _EXPERT_PARALLEL,
    **dict.fromkeys(
        ("gather", "local", "local_colwise", "local_rowwise", "local_packed_rowwise", "colwise_gather"),
        _VERSION_4,
    ),
}
KNOWN_STYLES = (*MODULE_STYLES, "packed_rowwise", SUMMED, REPLICATED)


def style_problem(style: object) -> str:
    """Return why a plan cannot have ``style``, and what to do; empty if it can."""
    if not isinstance(style, str) or style in KNOWN_STYLES:
        return ""
    if style in _REFUSED:
        return f"It is not supported: {_REFUSED[style]}."
    return f"It is unknown. Use one of {', '.join(KNOWN_STYLES)}."


def module_problem(model: nn.Module, name: str, style: str) -> str:
    """Return why ``style`` is none for the module ``name`` of ``model``; empty if it is one."""
    module: Any = model.get_submodule(name)
    kinds: tuple[type[nn.Module], ...] = (nn.Module,)
    if style in _EMBEDDINGS:
        kinds = (nn.Embedding,)
    elif style in _LINEAR or (style in _PROJECTIONS and not is_conv1d(module)):
        kinds = (nn.Linear, nn.Embedding) if style in ("colwise", "rowwise") else (nn.Linear,)
    if not isinstance(module, kinds):
        return f"expected {' or '.join(each.__name__ for each in kinds)}, got {type(module).__name__}"
    if style == "packed_rowwise":
        return "expected a parameter, got a module"
    if style == "mla_kv_a_proj" and not _rotary(model, name):
        return "expected qk_rope_head_dim in its attention module or the configuration, got none"
    if style == "colwise_multi_query" and not hasattr(_parent(model, name), "head_dim"):
        return "expected head_dim in its attention module, got none"
    if style in EXPERTS and getattr(module, "has_post_expert_norm", False):
        return "expected a sum over the experts' width, got a norm behind it"
    return ""


def _projects(module: nn.Module) -> bool:
    """Return whether a module is a product with its weight and nothing else."""
    return is_conv1d(module) or type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def _parent(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _rotary(model: nn.Module, name: str) -> int | None:
    """Return the numbers of a key of multi-head latent attention that are rotated."""
    parent = _parent(model, name)
    config = getattr(parent, "config", None) or getattr(model, "config", None)
    found: int | None = getattr(parent, "qk_rope_head_dim", None) or getattr(config, "qk_rope_head_dim", None)
    return found


def _layers(layer: str, **names: str) -> dict[str, str]:
    """Return the styles of a layer's modules, by style their names in the layer."""
    return {f"{layer}.{name}": style for style, some in names.items() for name in some.split()}


_GPT2 = _layers(
    "h.*",
    local_heads="attn crossattention",
    colwise_thirds="attn.c_attn",  # query | key | value
    colwise_halves="crossattention.c_attn",  # key | value
    colwise="mlp.c_fc crossattention.q_attn",
    rowwise="attn.c_proj mlp.c_proj crossattention.c_proj",
)
_GPTJ = _layers(
    "h.*",
    local_heads="attn",
    colwise="attn.q_proj attn.k_proj attn.v_proj mlp.fc_in",
    rowwise="attn.out_proj mlp.fc_out",
)
# The query, key and value of a head are neighbors, so consecutive outputs are whole heads.
_BLOOM = _layers(
    "h.*",
    local_heads="self_attention",
    colwise="self_attention.query_key_value mlp.dense_h_to_4h",
    rowwise="self_attention.dense mlp.dense_4h_to_h",
)
# Falcon-7B: all heads' queries, and behind them one key and one value.
_FALCON_MULTI_QUERY = {
    **_BLOOM,
    "h.*.self_attention": "local_query_heads",
    "h.*.self_attention.query_key_value": "colwise_multi_query",
}
_OPT = _layers(
    "decoder.layers.*",
    local_heads="self_attn",
    colwise="self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1",
    rowwise="self_attn.out_proj fc2",
)
_BERT_ATTENTION = {"colwise": "self.query self.key self.value", "rowwise": "output.dense"}
_BERT = {
    **_layers("encoder.layer.*.attention", **_BERT_ATTENTION),
    **_layers("encoder.layer.*.crossattention", **_BERT_ATTENTION),
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*[0-9].output.dense": "rowwise",
}


def _t5(attention: str) -> dict[str, str]:
    return {
        attention: "local_heads",
        **_layers(attention, colwise="q k v", rowwise="o", embedding_heads="relative_attention_bias"),
    }


_T5 = {
    **_t5("encoder.block.*.layer.0.SelfAttention"),
    **_t5("decoder.block.*.layer.0.SelfAttention"),
    **_t5("decoder.block.*.layer.1.EncDecAttention"),
    **_layers("*.DenseReluDense", colwise="wi wi_0 wi_1", rowwise="wo"),
}
# By the type of the model in transformers: styles by patterns of names of modules and parameters.
PLANS: dict[str, dict[str, str]] = {
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "opt": _OPT,
    **dict.fromkeys(("bloom", "falcon"), _BLOOM),
    **dict.fromkeys(("t5", "mt5"), _T5),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
}

# Changes to plans that transformers ships, by the type of the model. Between their projections these models
# use all heads: in a mask, in values that they add, or in a norm.
_FULL_HEADS = {
    **{f"layers.*.self_attn.{each}_proj": "colwise_gather_output" for each in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}
_CORRECTIONS = {
    "doge": {**_FULL_HEADS, "layers.*.self_attn.dt_proj": "rowwise_split_input"},
    "esmc": _FULL_HEADS,
    "neomme": {
        **_FULL_HEADS,
        "layers.*.self_attn.output_projection.gate_proj": "colwise_gather_output",
        "layers.*.self_attn.output_projection.o_proj": "rowwise_split_input",
    },
}


def corrections(config: Any) -> dict[str, str]:
    """Return the entries to change in the plan that transformers ships for the base model of ``config``."""
    return dict(_CORRECTIONS.get(str(getattr(config, "model_type", "")), {}))


def known_plan(config: Any) -> dict[str, str]:
    """Return the plan for the base model of transformers' ``config``, where it ships none; empty where none
    is known. Patterns that name nothing in a model are part of it, such as those of cross-attention."""
    kind = str(getattr(config, "model_type", ""))
    if kind == "falcon" and config.multi_query and not config.new_decoder_architecture:
        return dict(_FALCON_MULTI_QUERY)
    return dict(PLANS.get(kind, {}))
