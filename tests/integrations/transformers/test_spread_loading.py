"""Experts from files straight to the ranks that have them: as loaded in full and spread afterwards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import zero_ext
from tests.integrations.transformers.mixtures import EXPERTS, batches, mean_losses, mixture_of, optimizer_of
from tests.integrations.transformers.models import enter
from tests.integrations.transformers.test_mixture_loading import (
    assert_same,
    random_mixture,
    renamed,
    rewrite,
    without,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint.weights import load_into_meta
from zero_ext.integrations.transformers import from_pretrained
from zero_ext.integrations.transformers.model_patches import mark_prepared
from zero_ext.parallel import apply_expert_parallel, make_mesh
from zero_ext.zero.construction.grouping import DTYPES
from zero_ext.zero.units.dtensor_local import is_distributed, local_tensor
from zero_ext.zero.units.presharded import presharded_of

# Stages and ranks along "ep" of the four. With four, no other rank has the same experts.
CASES = [(1, 2), (2, 4), (3, 1), (3, 2), (3, 4)]


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """All ranks, experts spread over ``ep`` of them; made once in a process."""
    return make_mesh(ep=ep, device_type="cpu")


def local_value_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's experts, or the full tensor of what is not spread."""
    presharded = presharded_of(parameter)
    return local_tensor(parameter.detach()) if presharded is None else presharded.gather()


# Families, and whether their files have the matrices of each expert one by one or stacked.
FILES = [
    *((family, layout) for family in ("mixtral", "deepseek_v3") for layout in ("single", "stacked")),
    ("qwen3_moe", "single"),
    ("gpt_oss", "stacked"),
    ("llama4", "stacked"),
]


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("family", "layout"), FILES)
def test_each_rank_has_what_spreading_the_full_model_leaves(world: World, family: str, layout: str) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        model = random_mixture(family, world.seed)
        model.save_pretrained(folder / "saved", save_original_format=layout == "single")
    world.barrier()
    files = load_file(folder / "saved" / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(folder / "saved")
    for stage, ep in CASES:
        label, config = f"stage {stage}, ep {ep}, seed {world.seed}", {"stage": stage}
        spread = apply_expert_parallel(copy.deepcopy(expected), mesh_of(ep))
        model = from_pretrained(AutoModelForCausalLM, folder / "saved", config, process_group=mesh_of(ep))
        for name, parameter in spread.named_parameters():
            found = model.get_parameter(name)
            assert is_distributed(found) == is_distributed(parameter), (label, name)
            assert torch.equal(local_value_of(found), local_tensor(parameter)), (label, name)
        model, _ = zero_ext.prepare(model, None, config, process_group=mesh_of(ep), wrap=False)
        assert_same(zero_ext.full_state_dict(model), expected.state_dict(), label)
        mark_prepared(model, None)
        model.save_pretrained(folder / "again")
        world.barrier()
        assert_same(load_file(folder / "again" / "model.safetensors"), files, label)
        world.barrier()


@on_ranks(4)
@pytest.mark.parametrize("layout", ["single", "stacked"])
def test_each_rank_reads_its_own_experts_alone(world: World, layout: str) -> None:
    enter(world)
    read: list[int] = []

    class CountingReader(load_into_meta.ChunkReader):
        def verified(self, requests: Any) -> Any:
            read.append(sum(each.chunk.size for each in requests))
            return super().verified(requests)

    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("qwen3_moe", world.seed).save_pretrained(folder, save_original_format=layout == "single")
    world.barrier()
    full = mixture_of("qwen3_moe", world.seed)
    experts = sum(each.numel() for name, each in full.named_parameters() if ".experts." in name)
    others = full.num_parameters() - experts
    with mock.patch.object(load_into_meta, "ChunkReader", CountingReader):
        for stage, ep in CASES:
            from_pretrained(AutoModelForCausalLM, folder, {"stage": stage}, process_group=mesh_of(ep))
            holders, everyone = (world.size // ep, world.size) if stage == 3 else (1, 1)
            own = world.everyone(read.pop())
            if stage < 3:
                assert own == [4 * (experts // ep + others)] * world.size, (stage, ep)
            # Padding makes shards of other ranks longer than the last one's.
            assert sum(own) == 4 * world.size * (experts // ep // holders) + 4 * others * (
                world.size // everyone
            ), (stage, ep)


@on_ranks(4)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_spread_experts_load_into_every_tier(world: World, tier: str) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        random_mixture("gpt_oss", world.seed).save_pretrained(folder / "saved")
    world.barrier()
    expected = AutoModelForCausalLM.from_pretrained(folder / "saved")
    stored = {"nvme_paths": [str(folder)]} if tier == "nvme" else {}
    config = {"stage": 3, "offload": {"params": tier, **stored}, "parallel": {"ep": 2}}
    model = from_pretrained(AutoModelForCausalLM, folder / "saved", config)  # the section makes the mesh
    model, _ = zero_ext.prepare(model, optimizer_of(model), config, process_group=mesh_of(2))
    assert_same(zero_ext.full_state_dict(model), expected.state_dict(), f"seed {world.seed}")


@on_ranks(4)
def test_a_skeleton_without_values_is_spread_and_loads_a_checkpoint(world: World) -> None:
    enter(world)
    made = mixture_of("mixtral", world.seed)
    folder = world.shared_folder()
    model = apply_expert_parallel(mixture_of("mixtral", world.seed), mesh_of(4))
    model, _ = zero_ext.prepare(model, optimizer_of(model), {"stage": 3}, process_group=mesh_of(4))
    zero_ext.save_checkpoint(folder / "saved", model).wait()
    for stage, ep in CASES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made.config)
        for name, buffer in made.named_buffers():  # of which checkpoints have none
            module, _, key = name.rpartition(".")
            model.get_submodule(module)._buffers[key] = buffer.clone()
        model = apply_expert_parallel(model, mesh_of(ep))
        group = {"process_group": mesh_of(ep), "init": "skip"}
        model, _ = zero_ext.prepare(model, optimizer_of(model), {"stage": stage}, **group)
        zero_ext.load_checkpoint(folder / "saved", model)
        assert_same(zero_ext.full_state_dict(model), made.state_dict(), f"{stage}, {ep}, {world.seed}")


@on_ranks(2)
@pytest.mark.parametrize("by", ["call", "loading"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "fp16"), (3, "bf16")])
def test_spread_experts_are_converted_like_full_ones(world: World, by: str, stage: int, dtype: str) -> None:
    enter(world)
    config: dict[str, Any] = {"stage": stage, "precision": {"dtype": dtype}}
    group: Any = {"process_group": mesh_of(2)}
    folder = world.shared_folder()
    if world.rank == 0:
        random_mixture("mixtral", world.seed).save_pretrained(folder / "saved")
    world.barrier()
    made = AutoModelForCausalLM.from_pretrained(folder / "saved")
    losses = []
    for mesh in (mesh_of(1), mesh_of(2)):
        if by == "call":
            model = apply_expert_parallel(copy.deepcopy(made), mesh)
        else:
            model = from_pretrained(AutoModelForCausalLM, folder / "saved", config, process_group=mesh)
        optimizer = optimizer_of(model)
        model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=mesh)
        if mesh is mesh_of(2):
            zero_ext.save_checkpoint(folder / "checkpoint", model).wait()
        losses.append(mean_losses(world, model, optimizer, batches(world.seed, world.size, 2)))
    assert {each.dtype for each in model.parameters()} == {DTYPES[dtype]}
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0, msg=f"seed {world.seed}")
    # Master weights have the values from before the conversion.
    again = apply_expert_parallel(mixture_of("mixtral", world.seed + 1), mesh_of(2))
    again, _ = zero_ext.prepare(again, optimizer_of(again), {"stage": 3}, **group)
    zero_ext.load_checkpoint(folder / "checkpoint", again)
    assert_same(zero_ext.full_state_dict(again), made.state_dict(), f"seed {world.seed}")


@on_ranks(2)
def test_models_with_spread_experts_are_copied(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        random_mixture("mixtral", world.seed).save_pretrained(folder / "saved")
    world.barrier()
    made = AutoModelForCausalLM.from_pretrained(folder / "saved")
    group: Any = {"process_group": mesh_of(2)}
    model = from_pretrained(AutoModelForCausalLM, folder / "saved", {"stage": 3}, **group)
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"got shards\. Call zero_ext\.prepare"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    copied, _ = zero_ext.prepare(copied, optimizer_of(copied), {"stage": 3}, **group)
    assert_same(zero_ext.full_state_dict(copied), made.state_dict(), f"seed {world.seed}")


def _without_down_projections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if ".layers.1." not in key}


FIRST = "model.layers.0.block_sparse_moe.experts."
# The files, the mesh, the configuration, and the error on all ranks.
REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, int], dict[str, Any], str]] = {
    "experts are missing": (
        _without_down_projections,
        {"ep": 2},
        {},
        "layers.1.mlp.experts.down_proj': expected it in the files, as its experts are spread over ranks",
    ),
    "an expert of another rank is missing": (
        without(*(f"{FIRST}0.{name}.weight" for name in ("w1", "w2", "w3"))),
        {"ep": 4},
        {},
        "expected experts 0 to 7 in",
    ),
    "other names": (
        renamed(".w2.weight", ".second.weight"),
        {"ep": 2},
        {},
        "down_proj': expected it in the files, or experts that transformers converts to it",
    ),
    "tensors are split": (dict, {"ep": 2, "tp": 2}, {}, "longer than 1, got {'tp': 2}. Load the"),
    "layers are split": (dict, {"pp": 2}, {}, "longer than 1, got {'pp': 2}. Load the"),
    "sequences are split": (dict, {"ep": 2, "cp": 2}, {}, "experts of transformers, got {'cp': 2}"),
    "other lengths": (
        dict,
        {"ep": 2},
        {"ep": 4},
        "parallel.ep: expected the length of 'ep' in process_group (2)",
    ),
}


@on_ranks(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_spread_is_refused_on_all_ranks(world: World, case: str) -> None:
    enter(world)
    change, lengths, section, words = REFUSED[case]
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("mixtral", world.seed).save_pretrained(folder)
        rewrite(folder, change)
    world.barrier()
    config = {"stage": 3, "parallel": section} if section else {"stage": 3}
    mesh = make_mesh(**lengths, device_type="cpu")
    with pytest.raises(ValueError, match=re.escape(words)):
        from_pretrained(AutoModelForCausalLM, folder, config, process_group=mesh)


@on_ranks(4)
def test_sharded_experts_are_refused_with_the_call_that_spreads_them(world: World) -> None:
    enter(world)
    folder = world.shared_folder()
    if world.rank == 0:
        mixture_of("mixtral", world.seed).save_pretrained(folder)
    world.barrier()
    model = from_pretrained(AutoModelForCausalLM, folder, {"stage": 3})
    with pytest.raises(
        ValueError, match=r"got one that was sharded .*pass process_group=mesh to from_pretrained"
    ):
        apply_expert_parallel(model, mesh_of(2))
    assert model.model.layers[0].mlp.experts.num_experts == EXPERTS
