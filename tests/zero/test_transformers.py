"""A Llama from transformers, tied and untied: training, generate, and what would save placeholders."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import language_batch, llama
from tests.zero.training import Plan, adamw, check_against_plain, check_same, configuration, prepared
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitState


def llama_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_training_and_generation(world: World, tied: bool) -> None:
    torch.manual_seed(world.seed)
    model = llama(2, tied)
    check_against_plain(
        world, copy.deepcopy(model), llama_loss, language_batch, 3, Plan(clip=1.0), tolerance=2e-6
    )
    twin = copy.deepcopy(model).eval()
    model, _ = zero_ext.prepare(
        model, adamw(model.parameters()), configuration(3), process_group=world.group, wrap=False
    )
    prompt = torch.arange(4).unsqueeze(0)
    model.eval()
    ours = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, twin.generate(prompt, max_new_tokens=6, do_sample=False))
    assert all(unit.state is not UnitState.GATHERED for unit in engine_of(model).units)


@on_ranks(2)
def test_save_pretrained_never_writes_placeholders(world: World) -> None:
    model = llama(2, True)
    model, _ = prepared(world, model)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError, match="full_state_dict"):
        model.module.save_pretrained(folder)
    state = zero_ext.full_state_dict(model)
    if world.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.module.save_pretrained(folder, state_dict=dict(state))
            loaded = type(model.module).from_pretrained(folder)
        check_same(loaded.state_dict(), state)
    world.barrier()
