"""Weights that are born as shards, straight from safetensors: values, tiers, and what does not fit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.weights.block_map import BlockMap
from zero_ext.checkpoint.weights.load_into_meta import NamedTensors, load_into_meta
from zero_ext.config import ZeroConfig
from zero_ext.zero.units.presharded import presharded_of


class Net(nn.Module):
    """A tied pair, odd sizes, a buffer, and a parameter in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(5, 1, 7).bfloat16(), requires_grad=False)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.rand(3))


def on_meta() -> Net:
    """The same without values."""
    with torch.device("meta"):
        return Net()


def same(files: Any) -> NamedTensors:
    """Names in the files are those in the model, but for a prefix."""
    tensors = {
        key.removeprefix("net."): BlockMap.stored(key, tensor.entry.shape)
        for key, (_, tensor) in files.tensors.items()
    }
    return NamedTensors(tensors, [])


def write(world: World, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Rank 0 writes the tensors, whose names get a prefix."""
    if world.rank == 0:
        tensors = {f"net.{name}": value for name, value in state.items()}
        save_file(
            {name: value.clone().contiguous() for name, value in tensors.items()},
            folder / "model.safetensors",
        )
    world.barrier()


@on_ranks(1, 2, 3)
def test_every_stage_and_tier_gets_the_values_of_the_file(world: World) -> None:
    full = Net()
    state = dict(full.state_dict())
    del state["head.weight"]
    state["layers.0.weight"] = state["layers.0.weight"].double()  # converted on the way
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(own)[0])
        write(world, folder, state)
        tiers = ({}, {"params": "host"}, {"params": "nvme", "nvme_paths": [str(folder)]})
        cases = [(3, each) for each in tiers] + [(2, {}), (0, {})]
        for stage, offload in cases:
            config = ZeroConfig.from_mapping({"stage": stage, "offload": offload})
            model = on_meta()
            missing, unexpected = load_into_meta(model, folder, config, same, world.group)
            assert missing == unexpected == []
            assert model.head.weight is model.embed.weight and not model.scale.requires_grad
            sharded = stage == 3 and (world.size > 1 or bool(offload))
            assert all((presharded_of(each) is not None) == sharded for each in model.parameters())
            assert torch.equal(model.offset, full.offset)
            prepared, _ = zero_ext.prepare(model, None, config, process_group=world.group)
            found = zero_ext.full_state_dict(prepared)
            assert found.keys() == full.state_dict().keys()
            assert all(torch.equal(found[name], value) for name, value in full.state_dict().items())
        world.barrier()


@on_ranks(1, 2)
def test_what_is_missing_stays_on_meta_and_what_does_not_fit_is_refused(world: World) -> None:
    config = ZeroConfig.from_mapping({"stage": 3})
    state = dict(Net().state_dict())
    del state["head.weight"]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(own)[0])
        less = {name: value for name, value in state.items() if not name.startswith("layers.1")}
        write(world, folder, {**less, "other": torch.zeros(2)})
        model = on_meta()
        missing, unexpected = load_into_meta(model, folder, config, same, world.group)
        assert missing == ["layers.1.weight", "layers.1.bias"] and unexpected == ["net.other"]
        assert model.layers[1].weight.is_meta and not model.layers[0].weight.is_meta
        for changed, words in (
            ({"layers.0.bias": torch.zeros(12)}, r"layers.0.bias.*\(13,\).*\(12,\)"),
            ({"layers.0.bias": torch.zeros(13, dtype=torch.int64)}, "float32.*int64"),
        ):
            write(world, folder, {**state, **changed})
            with pytest.raises(ValueError, match=words):
                load_into_meta(on_meta(), folder, config, same, world.group)
        write(world, folder, {"other": torch.zeros(2)})
        with pytest.raises(ValueError, match=r"expected tensors of Net, got net.other"):
            load_into_meta(on_meta(), folder, config, same, world.group)
        with pytest.raises(CheckpointError, match="nowhere"):
            load_into_meta(on_meta(), folder / "nowhere.safetensors", config, same, world.group)
        world.barrier()
