"""Plans for models of transformers that bring none along, in the words of :func:`split_tensors`."""

from __future__ import annotations

from typing import Any

_GPT2 = {
    "h.*.attn": "local_heads",
    "h.*.attn.c_attn": "colwise_thirds",  # query | key | value
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_GPT2_CROSS = {
    "h.*.crossattention": "local_heads",
    "h.*.crossattention.q_attn": "colwise",
    "h.*.crossattention.c_attn": "colwise_halves",  # key | value
    "h.*.crossattention.c_proj": "rowwise",
}
# A head's query, key and value lie side by side, so that a run of outputs is a number of heads.
_BLOOM = {
    "h.*.self_attention": "local_heads",
    "h.*.self_attention.query_key_value": "colwise",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}
_BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*[0-9].output.dense": "rowwise",
}
_BERT_CROSS = {name.replace("attention.", "crossattention.", 1): style for name, style in _BERT.items()}


def known_plan(config: Any) -> dict[str, str]:
    """The plan for the base model of transformers' ``config``; empty if none is known."""
    kind = getattr(config, "model_type", None)
    crossing = bool(getattr(config, "add_cross_attention", False))
    if kind == "gpt2":
        return {**_GPT2, **(_GPT2_CROSS if crossing else {})}
    if kind == "bert":
        return {**_BERT, **(_BERT_CROSS if crossing else {})}
    return dict(_BLOOM) if kind == "bloom" else {}
