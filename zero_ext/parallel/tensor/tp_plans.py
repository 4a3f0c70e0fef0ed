"""Tensor-parallel plans for models of transformers that ship none, for ``apply_tensor_parallel``."""

from __future__ import annotations

from typing import Any

_GPT2 = {
    "h.*.attn": "local_heads",
    "h.*.attn.c_attn": "colwise_thirds",  # query | key | value
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
    "h.*.crossattention": "local_heads",
    "h.*.crossattention.q_attn": "colwise",
    "h.*.crossattention.c_attn": "colwise_halves",  # key | value
    "h.*.crossattention.c_proj": "rowwise",
}
_GPTJ = {
    "h.*.attn": "local_heads",
    "h.*.attn.q_proj": "colwise",
    "h.*.attn.k_proj": "colwise",
    "h.*.attn.v_proj": "colwise",
    "h.*.attn.out_proj": "rowwise",
    "h.*.mlp.fc_in": "colwise",
    "h.*.mlp.fc_out": "rowwise",
}
# The query, key and value of a head are neighbors, so consecutive outputs are whole heads.
_BLOOM = {
    "h.*.self_attention": "local_heads",
    "h.*.self_attention.query_key_value": "colwise",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}
# Falcon-7B: all heads' queries, and behind them one key and one value.
_FALCON_MULTI_QUERY = {
    **_BLOOM,
    "h.*.self_attention": "local_query_heads",
    "h.*.self_attention.query_key_value": "colwise_multi_query",
}
_OPT = {
    "decoder.layers.*.self_attn": "local_heads",
    "decoder.layers.*.self_attn.q_proj": "colwise",
    "decoder.layers.*.self_attn.k_proj": "colwise",
    "decoder.layers.*.self_attn.v_proj": "colwise",
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
}
_BERT_ATTENTION = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
}
_BERT = {
    **_BERT_ATTENTION,
    **{name.replace("attention.", "crossattention.", 1): style for name, style in _BERT_ATTENTION.items()},
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*[0-9].output.dense": "rowwise",
}


def _t5(stack: str, attention: str, number: int) -> dict[str, str]:
    name = f"{stack}.block.*.layer.{number}.{attention}"
    return {
        name: "local_heads",
        **{f"{name}.{each}": "colwise" for each in "qkv"},
        f"{name}.o": "rowwise",
        f"{name}.relative_attention_bias": "embedding_heads",
    }


_T5 = {
    **_t5("encoder", "SelfAttention", 0),
    **_t5("decoder", "SelfAttention", 0),
    **_t5("decoder", "EncDecAttention", 1),
    "*.DenseReluDense.wi": "colwise",
    "*.DenseReluDense.wi_0": "colwise",
    "*.DenseReluDense.wi_1": "colwise",
    "*.DenseReluDense.wo": "rowwise",
}
_PLANS = {
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "opt": _OPT,
    "t5": _T5,
    "mt5": _T5,
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
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
    """Return the plan for the base model of transformers' ``config``, where it ships none.

    Patterns that name nothing in a model are part of it, such as those of cross-attention.

    Returns:
        Styles by pattern; empty where no plan is known.
    """
    kind = str(getattr(config, "model_type", ""))
    if kind == "falcon" and config.multi_query and not config.new_decoder_architecture:
        return dict(_FALCON_MULTI_QUERY)
    return dict(_PLANS.get(kind, {}))
