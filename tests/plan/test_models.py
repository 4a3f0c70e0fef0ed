"""What a MODEL on the command line means: presets, counts, Hugging Face configs, and files that lie."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from zero_ext.plan.models import PRESETS, model_named

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "vocab_size": 50257,
    "n_positions": 1024,
}
BLOOM = {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def written(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(
    ("values", "parameters"),
    [  # as their makers count them; BERT with the head of masked language modeling
        (LLAMA, 8_030_261_248),
        (GPT2, 1_557_611_200),
        (BLOOM, 559_214_592),
        (BERT, 109_514_298),
    ],
)
def test_published_models_have_their_parameters(
    tmp_path: Path, values: dict[str, Any], parameters: int
) -> None:
    assert model_named(written(tmp_path, values)).parameters == parameters
    assert model_named(str(tmp_path)).parameters == parameters  # the folder


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-7b", 6_738_415_616), ("bloom-560m", 559_214_592), ("gpt2-xl", 1_557_611_200)],
)
def test_presets_have_the_parameters_of_their_models(name: str, parameters: int) -> None:
    assert model_named(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [("13b", 13), ("175b", 175), ("1t", 1000), ("2T", 2000), ("10t", 10_000), ("100t", 100_000)],
)
def test_round_names_are_presets_of_about_that_size(name: str, billions: float) -> None:
    model = model_named(name)
    assert model.source.startswith("preset")
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_a_count_is_exact_whatever_the_shape() -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(60):
        count = round(10 ** draw.uniform(3, 12))
        model = model_named(str(count))
        assert model.parameters == model.cost().parameters == count
        assert model.shape.cost().parameters == pytest.approx(count, rel=0.5)
    for text, count in (("7.5B", 7.5e9), ("350M", 3.5e8)):
        assert model_named(text).parameters == count


def test_every_preset_has_tiles_that_a_device_can_hold() -> None:
    for name in PRESETS:
        model = model_named(name)
        layers = model.full_cost.units[1:-1]
        assert max(unit.parameters for unit in layers) < 1.01e9
        assert model.parameters == sum(unit.parameters for unit in model.full_cost.units)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size: the required key is missing"),
        ({"hidden_size": "4096"}, r"hidden_size: expected an integer from .*, got '4096' \(str\)"),
        ({"hidden_size": True}, "hidden_size: expected .*, got True"),
        ({"hidden_size": 1 << 40}, "hidden_size: expected .*, got 1099511627776"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected .*, got 1000000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected .*, got -1"),
        ({"num_attention_heads": 33}, "num_key_value_heads: expected a divisor of .*, got 8"),
        ({"num_attention_heads": 24}, "num_attention_heads: expected a divisor of hidden_size .*, got 24"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected .*, got 'yes'"),
        ({"model_type": ["llama"]}, r"model_type: expected .*, got \['llama'\]"),
        ({"model_type": "mamba"}, r"model_type: expected one of llama.*, got 'mamba' \(str\)"),
        ({"num_local_experts": 8}, "num_local_experts: experts are planned for in mixtral"),
    ],
)
def test_a_config_that_lies_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, {**LLAMA, **changes})
    with pytest.raises(ValueError, match=words) as caught:
        model_named(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": 1, "a": 2}', '{"hidden_size": NaN}', "\0", "{" * 10**5]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        model_named(str(path))


def test_what_is_no_model_names_the_presets(tmp_path: Path) -> None:
    for word in ("no-such-model", "", "-7B", "12", "1e18"):
        with pytest.raises(ValueError, match="MODEL: expected"):
            model_named(word)
    with pytest.raises(ValueError, match="llama-7b"):
        model_named("llama-8b")
    with pytest.raises(ValueError, match=r"missing/config.json|cannot be read"):
        model_named(str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="cannot be read"):
        model_named(str(tmp_path))
