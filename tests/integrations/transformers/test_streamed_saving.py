"""``save_pretrained`` of sharded models: what transformers' own writes, and no rank holds all weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import zero_ext
from tests.integrations.transformers.models import llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint.files import Filesystem
from zero_ext.integrations.transformers import model_patches
from zero_ext.integrations.transformers.model_patches import mark_prepared
from zero_ext.integrations.transformers.streamed_saving import can_stream
from zero_ext.zero.units.collective_errors import CollectiveError

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQUENCES = {"vocab_size": 24, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}


def mixtral() -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_key_value_heads": 1, "vocab_size": 24}
    return MixtralForCausalLM(MixtralConfig(**TINY, **experts))


def bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(**SEQUENCES, max_position_embeddings=16))


def vit() -> PreTrainedModel:
    return ViTForImageClassification(ViTConfig(**TINY, image_size=8, patch_size=4))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(0),
    "mixtral": mixtral,
    "bart": bart,
    "vit": vit,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_files_of_transformers(world: World, name: str, stage: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(own)[0])
        torch.manual_seed(world.seed)
        model = MODELS[name]()
        if world.rank == 0:
            model.save_pretrained(folder / "plain")
        config = {"stage": stage, "units": {"bucket_elements": 500}}
        zero_ext.prepare(model, None, config, process_group=world.group, wrap=False)
        mark_prepared(model, None)
        assert can_stream(model)
        with mock.patch.object(model_patches, "full_state_dict", side_effect=AssertionError):
            model.save_pretrained(folder / "sharded")
        world.barrier()
        plain, sharded = folder / "plain", folder / "sharded"
        assert {path.name for path in plain.iterdir()} == {path.name for path in sharded.iterdir()}
        wanted, found = (load_file(each / "model.safetensors") for each in (plain, sharded))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        texts = ("config.json", "generation_config.json")
        for text in texts if model.can_generate() else texts[:1]:
            assert (plain / text).read_text() == (sharded / text).read_text()
        world.barrier()


@on_ranks(2)
@pytest.mark.parametrize("fault", ["others", "weights"])
def test_a_failure_leaves_the_folder(world: World, fault: str) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(own)[0])
        model = MODELS["llama"]()
        if world.rank == 0:
            model.save_pretrained(folder, max_shard_size="1KB")
        world.barrier()
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        world.barrier()
        zero_ext.prepare(model, None, {"stage": 3}, process_group=world.group, wrap=False)
        mark_prepared(model, None)
        error = OSError(28, "No space left on device")
        broken: Any = mock.patch.object(type(model.config), "save_pretrained", side_effect=error)
        if fault == "weights":
            broken = mock.patch.object(Filesystem, "rename", side_effect=error)
        with (
            broken if world.rank == 0 else nullcontext(),
            pytest.raises(CollectiveError, match=r"ranks \[0\]"),
        ):
            model.save_pretrained(folder)
        world.barrier()
        after = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert after.items() >= before.items()
        world.barrier()
        model.save_pretrained(folder)
        world.barrier()
        assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
        assert len(list(folder.glob("*.safetensors*"))) == 1
        world.barrier()


@on_ranks(2)
def test_what_asks_for_more_is_transformers_own(world: World) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(own)[0])
        model = MODELS["llama"]()
        zero_ext.prepare(model, None, {"stage": 3}, process_group=world.group, wrap=False)
        mark_prepared(model, None)
        wanted = zero_ext.full_state_dict(model)
        model.save_pretrained(folder, max_shard_size="1KB")
        world.barrier()
        assert len(list(folder.glob("*.safetensors"))) > 2
        model.save_pretrained(folder)
        world.barrier()
        assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(value, wanted[key]) for key, value in found.items())
        world.barrier()
