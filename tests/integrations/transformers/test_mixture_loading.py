"""Mixtures of experts from files in any layout into shards: what one process loads, and in less memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.core_model_loading import ConversionOps, WeightConverter

import zero_ext
from tests.integrations.transformers.mixtures import FAMILIES, mixture_of
from tests.integrations.transformers.models import enter
from tests.integrations.transformers.test_pretrained import resident
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers import from_pretrained, weight_conversion
from zero_ext.integrations.transformers.model_patches import mark_prepared
from zero_ext.integrations.transformers.streamed_saving import can_stream

MIB = 2**20
# Families whose files have one tensor for each matrix of an expert. The others have stacked experts alone.
SINGLE_EXPERTS = {
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "phi_moe",
    "jamba",
}
# Of the files and of the model, None for that of the files; and bytes of a file.
PRECISIONS: list[tuple[torch.dtype, torch.dtype | None, str]] = [
    (torch.float32, None, "50GB"),
    (torch.bfloat16, None, "8KB"),
    (torch.float32, torch.bfloat16, "8KB"),
    (torch.bfloat16, torch.float32, "50GB"),
    (torch.float32, torch.float16, "50GB"),
]


def random_mixture(family: str, seed: int) -> Any:
    """With random values in buffers too, as routers have them."""
    model = mixture_of(family, seed)
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.normal_(generator=generator)
    return model


def full_state(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """Every value of a model that was loaded as shards."""
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    prepared, _ = zero_ext.prepare(model, None, config, wrap=False)
    return zero_ext.full_state_dict(prepared)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label: str) -> None:
    assert found.keys() == expected.keys(), label
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (label, name)
        assert torch.equal(found[name], value), (label, name)


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("layout", ["single", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_what_one_process_loads(world: World, family: str, layout: str) -> None:
    enter(world)
    folder = world.shared_folder()
    for number, (stored, dtype, size) in enumerate(PRECISIONS):
        path = folder / str(number)
        if world.rank == 0:
            model = random_mixture(family, world.seed).to(stored)
            single = layout == "single"
            model.save_pretrained(path, max_shard_size=size, save_original_format=single)
        world.barrier()
        files = {key for file in path.glob("*.safetensors") for key in load_file(file)}
        assert any(".experts.0." in key for key in files) == (layout == "single" and family in SINGLE_EXPERTS)
        assert (path / "model.safetensors.index.json").exists() == (size == "8KB")
        options = {} if dtype is None else {"dtype": dtype}
        expected = AutoModelForCausalLM.from_pretrained(path, **options).state_dict()
        loaded = from_pretrained(AutoModelForCausalLM, path, {"stage": 3}, **options)
        label = f"{stored} as {dtype}, seed {world.seed}"
        assert_same(full_state(loaded, {"stage": 3}), expected, label)


@on_ranks(1, 2, 3)
def test_every_stage_and_tier(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        random_mixture("qwen3_moe", world.seed).save_pretrained(folder / "saved")
    world.barrier()
    expected = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    nvme = {"params": "nvme", "nvme_paths": [str(folder)]}
    for config in (
        {"stage": 2},
        {"stage": 3, "offload": {"params": "host"}},
        {"stage": 3, "offload": nvme},
    ):
        loaded = from_pretrained(AutoModelForCausalLM, folder / "saved", config)
        assert_same(full_state(loaded, config), expected, f"{config}, seed {world.seed}")


def vision_mixture(seed: int) -> Any:
    """A family with files of experts that are transposed."""
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    torch.manual_seed(seed)
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config={**text, **heads, **experts, "rope_parameters": rope},
            vision_config={**vision, "deepstack_visual_indexes": [0]},
        )
    )


@on_ranks(2)
def test_transposed_experts(world: World) -> None:
    enter(world)
    kind = Qwen3VLMoeForConditionalGeneration
    folder = world.shared_folder()
    if world.rank == 0:
        vision_mixture(world.seed).save_pretrained(folder)
        rewrite(
            folder,
            lambda tensors: {
                key: value.transpose(1, 2).contiguous() if ".experts." in key else value
                for key, value in tensors.items()
            },
        )
    world.barrier()
    expected = kind.from_pretrained(folder).state_dict()
    made = vision_mixture(world.seed).state_dict()
    assert_same(expected, made, "as saved")
    loaded = from_pretrained(kind, folder, {"stage": 3})
    assert_same(full_state(loaded, {"stage": 3}), expected, f"seed {world.seed}")


Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Replace the tensors of the one file in a folder."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


FIRST = "model.layers.0.block_sparse_moe.experts."


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key not in names}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def with_stacked(tensors: Tensors) -> Tensors:
    """The experts of the first layer twice: one by one, and stacked."""
    stacked = torch.stack([tensors[f"{FIRST}{number}.w2.weight"] for number in range(8)])
    return {**tensors, "model.layers.0.mlp.experts.down_proj": stacked}


def with_wrong_shape(tensors: Tensors) -> Tensors:
    return {**tensors, f"{FIRST}5.w3.weight": torch.zeros(16, 15)}


def with_wrong_shapes(tensors: Tensors) -> Tensors:
    return {
        key: value[:, :-1].contiguous() if key.endswith("w2.weight") else value
        for key, value in tensors.items()
    }


def with_integers(tensors: Tensors) -> Tensors:
    return {**tensors, f"{FIRST}5.w3.weight": torch.zeros(16, 16, dtype=torch.int32)}


def with_one_more(tensors: Tensors) -> Tensors:
    more = {f"{FIRST}8.{name}.weight": torch.zeros(16, 16) for name in ("w1", "w2", "w3")}
    return {**tensors, **more}


# What is done to the files of a Mixtral with 8 experts, and the error on all ranks.
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "an expert is missing": (
        without(*(f"{FIRST}3.{name}.weight" for name in ("w1", "w2", "w3"))),
        r"layers\.0\.mlp\.experts\.\w+': expected experts 0 to 7 in .*got none for \[3\]",
    ),
    "the last expert is missing": (
        without(*(f"{FIRST}7.{name}.weight" for name in ("w1", "w2", "w3"))),
        r"layers\.0\.mlp\.experts\.\w+': expected experts 0 to 7 in .*got none for \[7\]",
    ),
    "a matrix of an expert is missing": (
        without(f"{FIRST}7.w3.weight"),
        r"gate_up_proj': expected experts 0 to 7 in '.*w3.*', got none for \[7\]",
    ),
    "a matrix is missing everywhere": (
        without(*(f"{FIRST}{number}.w3.weight" for number in range(8))),
        r"gate_up_proj': expected experts 0 to 7 in '.*w3.*', got none",
    ),
    "an expert has a number twice": (
        lambda tensors: {**tensors, f"{FIRST}03.w2.weight": torch.zeros(16, 16)},
        r"down_proj': expected experts 0 to 7 in .*got \[3\] twice",
    ),
    "experts are there in two layouts": (
        with_stacked,
        r"layers\.0\.mlp\.experts\.down_proj': expected it once, got '.*w2\.weight'.* and 7 others",
    ),
    "one expert more": (with_one_more, r"expected shape \(8, .*got \(9, "),
    "another shape": (with_wrong_shape, r"5\.w3\.weight': expected shape \(16, 16\) .*, got \(16, 15\)"),
    "other shapes": (with_wrong_shapes, r"down_proj': expected shape \(8, 16, 16\), got \(8, 16, 15\)"),
    "rows that do not match": (
        lambda tensors: {
            key: value[:-1].contiguous() if key.endswith("w3.weight") else value
            for key, value in tensors.items()
        },
        r"gate_up_proj': expected shape \(8, 32, 16\), got \(8, 31, 16\)",
    ),
    "columns that do not match": (
        lambda tensors: {
            key: value[:, :-1].contiguous() if key.endswith("w3.weight") else value
            for key, value in tensors.items()
        },
        r"gate_up_proj': it cannot be assembled from .*w1\.weight'.* and 14 others: Sizes of tensors",
    ),
    "another type": (with_integers, r"gate_up_proj': expected torch.float32, got torch.int32"),
    "names that nothing converts": (
        renamed(".w2.weight", ".second.weight"),
        r"down_proj': expected it in the files, or experts .*got '.*experts\.0\.second\.weight'",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_experts_that_do_not_fit_are_refused_on_all_ranks(world: World, damage: str) -> None:
    enter(world)
    change, words = DAMAGES[damage]
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("mixtral", world.seed).save_pretrained(folder)
        rewrite(folder, change)
    world.barrier()
    with pytest.raises(ValueError, match=f"(?s){words}"):
        from_pretrained(MixtralForCausalLM, folder, {"stage": 3})


class Doubled(ConversionOps):
    """A conversion that computes with values."""

    reverse_op: Any = None

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}


@on_ranks(2)
def test_a_conversion_that_computes_is_refused(world: World) -> None:
    enter(world)
    rule = WeightConverter("embed_tokens.weight", "embed_tokens.weight", [Doubled()])
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("mixtral", world.seed).save_pretrained(folder, save_original_format=False)
    world.barrier()
    with (
        mock.patch.object(weight_conversion, "get_model_conversion_mapping", return_value=[rule]),
        pytest.raises(ValueError, match=r"embed_tokens\.weight' cannot be read .*mul.*zero_ext\.Init"),
    ):
        from_pretrained(MixtralForCausalLM, folder, {"stage": 3})
    with zero_ext.Init({"stage": 3}):
        model = MixtralForCausalLM.from_pretrained(folder)  # what the message says to do
    expected = MixtralForCausalLM.from_pretrained(folder).state_dict()
    assert_same(full_state(model, {"stage": 3}), expected, f"seed {world.seed}")


@on_ranks(2)
def test_quantized_experts_are_refused(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("gpt_oss", world.seed).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(config))
    world.barrier()
    with pytest.raises(ValueError, match=r"expected plain weights, got .*mxfp4"):
        from_pretrained(AutoModelForCausalLM, folder, {"stage": 3})


@on_ranks(2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_above_the_shards_is_at_most_one_layer_of_experts(world: World, precision: str) -> None:
    enter(world)
    dtype = getattr(torch, precision)
    width = 1024 if dtype == torch.bfloat16 else 512
    sizes = {"hidden_size": width, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8}
    folder = world.shared_folder()
    if world.rank == 0:
        torch.manual_seed(world.seed)
        large = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).to(dtype)
        large.save_pretrained(folder / "large", max_shard_size="60MB")
        mixture_of("mixtral", world.seed).to(dtype).save_pretrained(folder / "tiny")
        del large
    world.barrier()
    from_pretrained(MixtralForCausalLM, folder / "tiny", {"stage": 3})  # what is imported and allocated once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmHWM")
    model = from_pretrained(MixtralForCausalLM, folder / "large", {"stage": 3})
    above = resident("VmHWM") - before - model.num_parameters() * dtype.itemsize // 2
    layer = 8 * 3 * width * 768 * dtype.itemsize
    assert above < layer, f"{above / MIB:.1f} of {layer / MIB:.1f} MiB, seed {world.seed}"


@on_ranks(2)
@pytest.mark.parametrize("layout", ["single", "stacked"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "llama4"])
def test_what_is_saved_again_loads_equal_in_transformers(world: World, family: str, layout: str) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        model = random_mixture(family, world.seed)
        model.save_pretrained(folder / "first", save_original_format=layout == "single")
    world.barrier()
    expected: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "first")
    model = from_pretrained(AutoModelForCausalLM, folder / "first", {"stage": 3})
    zero_ext.prepare(model, None, {"stage": 3}, wrap=False)
    mark_prepared(model, None)
    assert can_stream(model)
    model.save_pretrained(folder / "second")
    world.barrier()
    first, second = (load_file(folder / name / "model.safetensors") for name in ("first", "second"))
    assert_same(second, first, "files")
    again = AutoModelForCausalLM.from_pretrained(folder / "second").state_dict()
    assert_same(again, expected.state_dict(), f"seed {world.seed}")
