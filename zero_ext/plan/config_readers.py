"""Sizes of models in a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_ext.config.config_errors import ConfigError, Problem, show
from zero_ext.config.sources.json_file import read_json_object
from zero_ext.plan.simulation.mixture import Mixture
from zero_ext.plan.simulation.transformer_cost import Transformer

LARGEST = 1 << 24  # of any one size
MOST_LAYERS = 10_000
DEFAULT_SEQUENCE = 2048
LIKE_LLAMA = ("llama", "mistral", "qwen2")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CORRECT = "Correct the file, or give a parameter count instead."


def shape_of_file(path: Path) -> tuple[Transformer, str]:
    """Return the sizes in a file, and its kind in words.

    Raises ConfigError (a ValueError) naming the file and the keys for anything that is no JSON object, sizes
    that are missing, of another type or out of bounds, and models of no known kind.
    """
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    keys = ConfigKeys(read_json_object(path), str(path), name)
    kind = keys.text("model_type")
    like_llama = kind in LIKE_LLAMA or (kind == "" and keys.has("intermediate_size"))
    reader = _llama if like_llama else _READERS.get(kind)
    if reader is None:
        raise keys.error(
            "model_type",
            f"expected one of {', '.join((*LIKE_LLAMA, *_READERS))}, got {show(kind)}. Give a parameter "
            "count instead.",
        )
    for expert in () if kind in _MIXTURES else (*EXPERTS, "moe_intermediate_size"):
        if keys.has(expert):
            raise keys.error(
                expert,
                f"experts are planned for in {', '.join(_MIXTURES)}, got {kind or 'no model_type'}. Give a "
                "parameter count instead.",
            )
    return reader(keys), kind or "read like llama"


class ConfigKeys:
    """Checked access to the values of one file."""

    def __init__(self, values: Mapping[str, object], source: str, name: str) -> None:
        self._values, self._source, self._name = values, source, name

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def text(self, name: str) -> str:
        value = self._values.get(name, "")
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, got {show(value)}. {_CORRECT}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, got {show(value)}. {_CORRECT}")
        return value

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Return the first of ``names`` that is there."""
        for name in names:
            if self.has(name):
                value = self._values[name]
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                    raise self.error(
                        name, f"expected an integer from {least} to {most}, got {show(value)}. {_CORRECT}"
                    )
                return value
        if default is None:
            raise self.error(names[0], f"the required key is missing. {_CORRECT}")
        return default

    def numbers(self, name: str) -> list[int]:
        """Return a list of numbers of layers, none if there is no such key."""
        found = self._values.get(name) or []
        if not isinstance(found, list) or any(type(each) is not int or each < 0 for each in found):
            raise self.error(name, f"expected a list of numbers of layers, got {show(found)}. {_CORRECT}")
        return found

    def divides(self, divisor: int, divisor_name: str, value: int, value_name: str) -> None:
        if value % divisor:
            raise self.error(
                divisor_name, f"expected a divisor of {value_name} ({value}), got {divisor}. {_CORRECT}"
            )

    def error(self, name: str, text: str) -> ConfigError:
        return ConfigError(Problem(name, text), self._source)

    def shape(
        self, hidden: int, heads: int, layers: tuple[str, ...] = ("num_hidden_layers",), **others: Any
    ) -> Transformer:
        """Return the shape with the sizes that all families name alike, and ``others``."""
        depth, words = self.size(*layers, most=MOST_LAYERS), self.size("vocab_size")
        return Transformer(self._name, hidden, depth, heads, words, **others)


def _llama(keys: ConfigKeys) -> Transformer:
    heads, groups, head = _attention_heads(keys)
    hidden, feed_forward = keys.size("hidden_size"), keys.size("intermediate_size")
    biased = keys.flag("attention_bias", False)
    vectors = 2 * hidden
    if keys.text("model_type") == "qwen2" or biased:
        vectors += heads * head + 2 * groups * head
    vectors += hidden if biased else 0
    vectors += 2 * feed_forward + hidden if keys.flag("mlp_bias", False) else 0
    return _gated(keys, vectors, feed_forward=feed_forward)


def _attention_heads(keys: ConfigKeys) -> tuple[int, int, int]:
    """Return heads of queries, heads of keys and values, and the width of a head."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    groups = keys.size("num_key_value_heads", default=heads)
    keys.divides(groups, "num_key_value_heads", heads, "num_attention_heads")
    head = keys.size("head_dim", default=0)
    if not head:
        keys.divides(heads, "num_attention_heads", hidden, "hidden_size")
        head = hidden // heads
    return heads, groups, head


def _gated(keys: ConfigKeys, vectors: int, **others: Any) -> Transformer:
    """Return a decoder like Llama's with ``vectors`` elements of biases and norms in a layer."""
    heads, groups, head = _attention_heads(keys)
    sizes: dict[str, Any] = {"key_value_heads": groups, "head_size": head, **others}
    return keys.shape(
        keys.size("hidden_size"),
        heads,
        sequence=keys.size("max_position_embeddings", default=DEFAULT_SEQUENCE),
        gated=True,
        tied=keys.flag("tie_word_embeddings", False),
        fused_attention=True,
        vectors=vectors,
        **sizes,
    )


def _mixture(keys: ConfigKeys, width: str, **others: Any) -> Mixture:
    """Return the experts, of hidden width ``width``, the name of a key."""
    name = next((name for name in EXPERTS if keys.has(name)), EXPERTS[0])
    experts, per_token = keys.size(name), keys.size("num_experts_per_tok")
    if per_token > experts:
        raise keys.error(
            "num_experts_per_tok", f"expected at most {name} ({experts}), got {per_token}. {_CORRECT}"
        )
    return Mixture(experts, per_token, keys.size(width), **others)


def _mixtral(keys: ConfigKeys) -> Transformer:
    return _gated(keys, 2 * keys.size("hidden_size"), mixture=_mixture(keys, "intermediate_size"))


def _olmoe(keys: ConfigKeys) -> Transformer:
    """With norms over all queries and all keys."""
    hidden, (heads, groups, _) = keys.size("hidden_size"), _attention_heads(keys)
    vectors = 3 * hidden + hidden // heads * groups
    vectors += _attention_biases(keys) if keys.flag("attention_bias", False) else 0
    return _gated(keys, vectors, mixture=_mixture(keys, "intermediate_size"))


def _qwen_moe(keys: ConfigKeys) -> Transformer:
    """Qwen2-MoE has biases of attention and shared experts with a gate, Qwen3-MoE norms of each head."""
    hidden, (heads, groups, head) = keys.size("hidden_size"), _attention_heads(keys)
    depth, step = (
        keys.size("num_hidden_layers", most=MOST_LAYERS),
        keys.size("decoder_sparse_step", default=1),
    )
    dense = {layer for layer in range(depth) if (layer + 1) % step} | set(keys.numbers("mlp_only_layers"))
    shared: dict[str, Any] = {"dense_layers": tuple(sorted(dense))}
    if keys.text("model_type") == "qwen2_moe":
        shared |= {"shared": keys.size("shared_expert_intermediate_size"), "gates": hidden}
        vectors = 2 * hidden + ((heads + 2 * groups) * head if keys.flag("qkv_bias", True) else 0)
    else:
        vectors = 2 * hidden + 2 * head
        vectors += _attention_biases(keys) if keys.flag("attention_bias", False) else 0
    mixture = _mixture(keys, "moe_intermediate_size", **shared)
    return _gated(keys, vectors, feed_forward=keys.size("intermediate_size"), mixture=mixture)


def _attention_biases(keys: ConfigKeys) -> int:
    heads, groups, head = _attention_heads(keys)
    return (heads + 2 * groups) * head + keys.size("hidden_size")


def _deepseek(keys: ConfigKeys) -> Transformer:
    """With multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    ``head_size`` is the mean of the widths of keys and values, which the FLOPs of attention depend on."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    rope, value = keys.size("qk_rope_head_dim"), keys.size("v_head_dim")
    key, latent = keys.size("qk_nope_head_dim") + rope, keys.size("kv_lora_rank")
    down = keys.size("q_lora_rank") if keys.has("q_lora_rank") else 0
    vectors = 2 * hidden + latent + down
    vectors += latent + rope + hidden + down if keys.flag("attention_bias", False) else 0
    attention = (
        *((hidden * down, down * heads * key) if down else (hidden * heads * key,)),
        hidden * (latent + rope),
        latent * heads * (key - rope + value),
        heads * value * hidden,
    )
    width = keys.size("moe_intermediate_size")
    depth = keys.size("num_hidden_layers", most=MOST_LAYERS)
    dense = keys.size("first_k_dense_replace", default=0, least=0, most=depth)
    mixture = _mixture(
        keys,
        "moe_intermediate_size",
        shared=width * keys.size("n_shared_experts", default=0, least=0),
        dense_layers=tuple(range(dense)),
    )
    return keys.shape(
        hidden,
        heads,
        sequence=keys.size("max_position_embeddings", default=DEFAULT_SEQUENCE),
        feed_forward=keys.size("intermediate_size"),
        gated=True,
        tied=keys.flag("tie_word_embeddings", False),
        fused_attention=True,
        head_size=-(-(key + value) // 2),
        vectors=vectors,
        attention=attention,
        mixture=mixture,
    )


def _gpt2(keys: ConfigKeys) -> Transformer:
    hidden, heads = _hidden_and_heads(keys, "n_embd", "n_head")
    positions = keys.size("n_positions", "n_ctx", default=1024)
    return keys.shape(
        hidden,
        heads,
        ("n_layer", "num_hidden_layers"),
        sequence=positions,
        feed_forward=keys.size("n_inner", default=4 * hidden),
        tied=keys.flag("tie_word_embeddings", True),
        fused_attention=True,
        before=positions * hidden,
    )


def _bloom(keys: ConfigKeys) -> Transformer:
    hidden, heads = _hidden_and_heads(keys, "n_embed", "n_head")
    sequence, tied = keys.size("seq_length", default=DEFAULT_SEQUENCE), keys.flag("tie_word_embeddings", True)
    layers = ("n_layer", "num_hidden_layers")
    return keys.shape(hidden, heads, layers, sequence=sequence, tied=tied, before=2 * hidden)


def _bert(keys: ConfigKeys) -> Transformer:
    """With the head of masked language modeling: a dense layer, a norm, and a bias of the tied matrix."""
    hidden, heads = _hidden_and_heads(keys, "hidden_size", "num_attention_heads")
    positions, vocabulary = keys.size("max_position_embeddings"), keys.size("vocab_size")
    return keys.shape(
        hidden,
        heads,
        sequence=positions,
        feed_forward=keys.size("intermediate_size", default=4 * hidden),
        tied=keys.flag("tie_word_embeddings", True),
        fused_attention=True,
        before=(positions + keys.size("type_vocab_size", default=2) + 2) * hidden,
        after=hidden * hidden + hidden + vocabulary,
    )


def _hidden_and_heads(keys: ConfigKeys, hidden_name: str, heads_name: str) -> tuple[int, int]:
    hidden = keys.size(hidden_name, "hidden_size")
    heads = keys.size(heads_name, "num_attention_heads")
    keys.divides(heads, heads_name, hidden, hidden_name)
    return hidden, heads


_MIXTURES: dict[str, Callable[[ConfigKeys], Transformer]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
_READERS = {"gpt2": _gpt2, "bloom": _bloom, "bert": _bert, "roberta": _bert} | _MIXTURES
