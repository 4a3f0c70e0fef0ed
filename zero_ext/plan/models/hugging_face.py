"""The shape that a Hugging Face ``config.json`` describes. Its values are taken for hostile until checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero_ext.config.config_errors import ConfigError, Problem, show
from zero_ext.config.json_file import read_json_object
from zero_ext.plan.models.model_spec import ModelSpec
from zero_ext.plan.simulation.transformer_cost import Transformer

LARGEST = 1 << 24  # of any one size
MOST_LAYERS = 10_000
DEFAULT_SEQUENCE = 2048
LIKE_LLAMA = ("llama", "mistral", "qwen2")
FAMILIES = (*LIKE_LLAMA, "gpt2", "bloom", "bert", "roberta")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_CORRECT = "Correct the file, or give a parameter count instead."


def model_of_file(path: Path) -> ModelSpec:
    """Read a ``config.json``.

    Raises ConfigError (a ValueError) naming the file and the keys for anything that is no JSON object, sizes
    that are missing, of another type or out of bounds, and models that are no dense transformers of a known
    kind.
    """
    keys = _Keys(read_json_object(path), str(path))
    kind = keys.text("model_type")
    for name in EXPERTS:
        if keys.has(name):
            raise keys.error(name, "mixtures of experts are not planned for. Give a parameter count instead.")
    readers = {"gpt2": _gpt2, "bloom": _bloom, "bert": _bert, "roberta": _bert}
    if kind in readers:
        shape = readers[kind](keys, path)
    elif kind in LIKE_LLAMA or (kind == "" and keys.has("intermediate_size")):
        shape = _llama(keys, path)
    else:
        raise keys.error(
            "model_type",
            f"expected one of {', '.join(FAMILIES)}, got {show(kind)}. Give a parameter count instead.",
        )
    return ModelSpec.of_shape(shape, f"{path} ({kind or 'read like llama'})")


class _Keys:
    """Checked access to the values of one file."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self._source = source

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

    def size(self, *names: str, default: int | None = None, most: int = LARGEST) -> int:
        """Return the first of ``names`` that is there."""
        for name in names:
            if self.has(name):
                value = self._values[name]
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                    raise self.error(
                        name, f"expected an integer from 1 to {most}, got {show(value)}. {_CORRECT}"
                    )
                return value
        if default is None:
            raise self.error(names[0], f"the required key is missing. {_CORRECT}")
        return default

    def divides(self, divisor: int, divisor_name: str, value: int, value_name: str) -> None:
        if value % divisor:
            raise self.error(
                divisor_name, f"expected a divisor of {value_name} ({value}), got {divisor}. {_CORRECT}"
            )

    def error(self, name: str, text: str) -> ConfigError:
        return ConfigError(Problem(name, text), self._source)


def _name(path: Path) -> str:
    return path.parent.resolve().name if path.name == "config.json" else path.stem


def _llama(keys: _Keys, path: Path) -> Transformer:
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    groups = keys.size("num_key_value_heads", default=heads)
    keys.divides(groups, "num_key_value_heads", heads, "num_attention_heads")
    head = keys.size("head_dim", default=0)
    if not head:
        keys.divides(heads, "num_attention_heads", hidden, "hidden_size")
        head = hidden // heads
    feed_forward = keys.size("intermediate_size")
    width, shared = heads * head, groups * head
    vectors = 2 * hidden
    if keys.text("model_type") == "qwen2" or keys.flag("attention_bias", False):
        vectors += width + 2 * shared
    if keys.flag("attention_bias", False):
        vectors += hidden
    if keys.flag("mlp_bias", False):
        vectors += 2 * feed_forward + hidden
    return Transformer(
        _name(path),
        hidden,
        keys.size("num_hidden_layers", most=MOST_LAYERS),
        heads,
        keys.size("vocab_size"),
        keys.size("max_position_embeddings", default=DEFAULT_SEQUENCE),
        feed_forward,
        gated=True,
        tied=keys.flag("tie_word_embeddings", False),
        fused_attention=True,
        key_value_heads=groups,
        head_size=head,
        vectors=vectors,
    )


def _gpt2(keys: _Keys, path: Path) -> Transformer:
    hidden, heads = _hidden_and_heads(keys, "n_embd", "n_head")
    positions = keys.size("n_positions", "n_ctx", default=1024)
    return Transformer(
        _name(path),
        hidden,
        keys.size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        heads,
        keys.size("vocab_size"),
        positions,
        keys.size("n_inner", default=4 * hidden),
        tied=keys.flag("tie_word_embeddings", True),
        fused_attention=True,
        before=positions * hidden,
    )


def _bloom(keys: _Keys, path: Path) -> Transformer:
    hidden, heads = _hidden_and_heads(keys, "n_embed", "n_head")
    return Transformer(
        _name(path),
        hidden,
        keys.size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        heads,
        keys.size("vocab_size"),
        keys.size("seq_length", default=DEFAULT_SEQUENCE),
        tied=keys.flag("tie_word_embeddings", True),
        before=2 * hidden,
    )


def _bert(keys: _Keys, path: Path) -> Transformer:
    """With the head of masked language modeling: a dense layer, a norm, and a bias of the tied matrix."""
    hidden, heads = _hidden_and_heads(keys, "hidden_size", "num_attention_heads")
    positions, vocabulary = keys.size("max_position_embeddings"), keys.size("vocab_size")
    types = keys.size("type_vocab_size", default=2)
    return Transformer(
        _name(path),
        hidden,
        keys.size("num_hidden_layers", most=MOST_LAYERS),
        heads,
        vocabulary,
        positions,
        keys.size("intermediate_size", default=4 * hidden),
        tied=keys.flag("tie_word_embeddings", True),
        fused_attention=True,
        before=(positions + types + 2) * hidden,
        after=hidden * hidden + hidden + vocabulary,
    )


def _hidden_and_heads(keys: _Keys, hidden_name: str, heads_name: str) -> tuple[int, int]:
    hidden = keys.size(hidden_name, "hidden_size")
    heads = keys.size(heads_name, "num_attention_heads")
    keys.divides(heads, heads_name, hidden, hidden_name)
    return hidden, heads
