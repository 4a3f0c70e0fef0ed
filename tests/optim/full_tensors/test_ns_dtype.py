"""Newton-Schulz in fp32: exact to its rounding in one process, and the same on all ranks and in all tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.full_tensors.test_muon import TIERS, plain, sharded
from tests.zero.training import check_same, prepared
from zero_ext.zero import engine_of

STEPS = 3


def exact(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The polynomial of Newton-Schulz in float64."""
    found = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        gram = found @ found.T
        found = 3.4445 * found + (-4.775 * gram + 2.0315 * gram @ gram) @ found
    return found


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (48, 48)], ids=str)
def test_one_process_is_exact_to_rounding_of_fp32(shape: tuple[int, int]) -> None:
    """In bfloat16 the error is above 1%."""
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(shape, generator=generator)
    errors = {}
    for ns_dtype in ("fp32", "bf16"):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = matrix.clone()
        zero_ext.Muon([parameter], lr=1.0, momentum=0.0, weight_decay=0.0, ns_dtype=ns_dtype).step()
        factor = max(1.0, shape[0] / shape[1]) ** 0.5
        wanted = exact(matrix)
        errors[ns_dtype] = ((-parameter.detach() / factor - wanted).norm() / wanted.norm()).item()
    assert errors["fp32"] < 1e-5 and errors["bf16"] > 5e-3, errors


@on_ranks(1, 2, 3, by_turns=True)
def test_ranks_equal_one_process(world: World) -> None:
    losses, parameters = plain(world, steps=STEPS, ns_dtypes=("fp32",))
    _, other = plain(world, steps=STEPS, ns_dtypes=("bf16",))
    assert not torch.equal(parameters["layers.0.weight"], other["layers.0.weight"])
    for stage, offload in TIERS:
        _, found, own = sharded(world, stage, offload, steps=STEPS, ns_dtypes=("fp32",))
        assert own == [each[world.rank] for each in losses], (stage, offload)
        check_same(found, parameters, (stage, offload))


@on_ranks(2)
def test_groups_of_both_dtypes_equal_one_process(world: World) -> None:
    _, parameters = plain(world, STEPS, ns_dtypes=("fp32", "bf16"))
    for stage in (0, 2, 3):
        _, found, _ = sharded(world, stage, {}, steps=STEPS, ns_dtypes=("fp32", "bf16"))
        check_same(found, parameters, stage)


@on_ranks(2, 3)
def test_directions_travel_in_it(world: World) -> None:
    sent = {}
    for ns_dtype in ("bf16", "fp32"):
        model, _, _ = sharded(world, 2, {}, steps=1, ns_dtypes=(ns_dtype,))
        sent[ns_dtype] = sum(world.everyone(engine_of(model).traffic.last_bytes_sent["matrices"]))
    assert sent["fp32"] == 2 * sent["bf16"] > 0, sent


@on_ranks(2)
def test_a_checkpoint_goes_on_in_fp32(world: World) -> None:
    def made(stage: int) -> tuple[Any, Any]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return zero_ext.Muon(parameters, lr=0.02, ns_dtype="fp32")

        torch.manual_seed(world.seed)
        return prepared(world, nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 6)), stage, make)

    def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(world.seed + 10 * step + world.rank)
            model(torch.randn(5, 12, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    folder = world.shared_folder()
    model, optimizer = made(3)
    steps(model, optimizer, 0, 2)
    zero_ext.save_checkpoint(folder, model)
    steps(model, optimizer, 2, 4)
    wanted = zero_ext.full_state_dict(model, rank0_only=False)
    model, optimizer = made(1)
    zero_ext.load_checkpoint(folder, model)
    steps(model, optimizer, 2, 4)
    check_same(zero_ext.full_state_dict(model, rank0_only=False), wanted)
