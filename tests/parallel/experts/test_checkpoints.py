"""One checkpoint of a model with experts, whatever ranks they are on."""

from __future__ import annotations

import tempfile

import torch
from safetensors.torch import load_file

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import Course, Words, adamw, alone, mesh_of
from tests.parallel.experts.test_training import mean_over


@on_ranks(4)
def test_experts_move_to_other_ranks(world: World) -> None:
    folder = str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    first = Course(world.seed, mesh_of(2), {"stage": 3})
    first.steps(world.seed, 0, 3)
    zero_ext.save_checkpoint(folder, first.model).wait()
    if world.rank == 0:
        zero_ext.checkpoint.export_huggingface(folder, folder + "-whole")
        full = load_file(folder + "-whole/model.safetensors")
        for name, value in alone(world.seed, 3)[1].items():
            torch.testing.assert_close(full.pop(name), value, rtol=1e-4, atol=1e-5)
        assert not full
    wanted, parameters = alone(world.seed, 5)
    for ep, stage in ((4, 1), (1, 3)):
        then = Course(world.seed + 1, mesh_of(ep), {"stage": stage})
        zero_ext.load_checkpoint(folder, then.model)
        records = then.steps(world.seed, 3, 5)
        torch.testing.assert_close(mean_over(world, records.losses), wanted.losses[3:], rtol=1e-5, atol=0)
        for name, value in zero_ext.full_state_dict(then.model).items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_a_model_without_values_is_filled(world: World) -> None:
    folder = str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    first = Course(world.seed, mesh_of(4), {"stage": 2})
    zero_ext.save_checkpoint(folder, first.model).wait()
    with torch.device("meta"):
        model = Words(mesh_of(2))
    prepared, _ = zero_ext.prepare(model, adamw(model), {"stage": 3}, process_group=mesh_of(2), init="skip")
    zero_ext.load_checkpoint(folder, prepared)
    torch.manual_seed(world.seed)
    wanted = Words().state_dict()
    for name, value in zero_ext.full_state_dict(prepared).items():
        assert torch.equal(value, wanted[name]), name
