"""The tensors of a call that are offloaded, and their layout when they are fetched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.activation.blocks import WIDTH, fresh_seed, same
from tests.activation.policies import made
from zero_ext.activation import ActivationCheckpointing
from zero_ext.config import ActivationCheckpointingConfig


def by_memory(x: torch.Tensor) -> torch.Tensor:
    """What is computed depends on how its argument lies in memory."""
    y = x.reshape(-1, 4) if x.is_contiguous() else x.t().reshape(-1, 4)
    return (y * torch.arange(4.0)).sin() * (x.stride(0) + x.data_ptr() % 64)


def spread(x: torch.Tensor) -> torch.Tensor:
    return (x / x.norm(dim=1, keepdim=True)).std(1).exp() + x.sum(1).exp()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a third": lambda x: x.chunk(3, -1)[0],
    "the middle third": lambda x: x[:, 64:128],
    "every third": lambda x: x[:, ::3],
    "odd begin": lambda x: x[4:, 5:],
    "transposed": lambda x: x.t()[:64, 3:],
    "windows": lambda x: x.flatten().unfold(0, 64, 32)[:32],
    "expanded": lambda x: x[:, 7:8].expand(200, 64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_fetched_with_their_strides(view: str, tmp_path: Path) -> None:
    """In every tier: the same strides, so the same branches and the same order of sums."""
    torch.manual_seed(fresh_seed())
    values = torch.randn(200, 192)
    for function in (by_memory, spread):
        found = []
        for run in (None, *(made(name, tmp_path) for name in ("recompute", "host", "nvme", "contiguous"))):
            source = values.clone().requires_grad_()
            each = VIEWS[view](source)
            out = function(each) if run is None else run(function, each)
            weight = torch.linspace(0.5, 2, out.numel()).view(out.shape)
            found.append([out.detach(), torch.autograd.grad((out * weight).sum(), source)[0]])
        assert all(same(each, found[0]) for each in found), function


def test_inputs_that_are_offloaded(tmp_path: Path) -> None:
    inputs = torch.randn(64, WIDTH, requires_grad=True) * 1
    mask, weight = torch.rand(64, 1), nn.Parameter(torch.randn(WIDTH))
    checkpointing = made("host", tmp_path)

    def function(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * mask * weight).sin()

    first = checkpointing(function, inputs, mask, weight)
    assert checkpointing.used_bytes() == inputs.nbytes + 4096  # the mask takes a page, the parameter stays
    second = checkpointing(function, first, mask, weight)
    assert checkpointing.used_bytes() == 2 * inputs.nbytes + 4096  # the mask is there already
    del first
    second.sum().backward()
    del second
    assert checkpointing.used_bytes() == 0


def test_slices_of_one_tensor_are_offloaded_separately(tmp_path: Path) -> None:
    """Nothing of the tensor stays on the device, which one slice that stays would hold."""
    for slices in (
        lambda x: x.unbind(),
        lambda x: x.chunk(3, -1),
        lambda x: x.unflatten(1, (3, -1)).unbind(1),
        lambda x: [x[:5], x[5:], x.t()],
    ):
        source = torch.randn(8, 192, requires_grad=True)
        checkpointing, hidden = made("host", tmp_path), source * 1
        (wanted,) = torch.autograd.grad(sum(each.sin().sum() for each in slices(hidden)), source)
        hidden = source * 1
        weak = StorageWeakRef(hidden.untyped_storage())
        wanted_bytes = sum(-(-each.nbytes // 4096) * 4096 for each in slices(hidden))
        outs = [checkpointing(torch.sin, each) for each in slices(hidden)]
        assert checkpointing.used_bytes() == wanted_bytes
        assert [checkpointing(torch.sin, each) for each in slices(hidden)]  # given before: these stay
        assert checkpointing.used_bytes() == wanted_bytes
        del hidden
        gc.collect()
        assert weak.expired()
        (found,) = torch.autograd.grad(sum(out.sum() for out in outs), source)
        assert torch.equal(found, wanted)


def test_a_bounded_number_of_inputs_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of every call is the last one to be forgotten."""
    monkeypatch.setattr("zero_ext.activation.activation_checkpoint._MAX_RECENT_INPUTS", 4)
    checkpointing, outputs, mask = made("host", tmp_path), [], torch.rand(64, WIDTH)
    for number in range(12):
        outputs.append(checkpointing(torch.mul, torch.ones(64, WIDTH, requires_grad=True) * 1, mask))
        assert checkpointing.used_bytes() == (2 + number) * mask.nbytes
        assert len(checkpointing._recent_inputs) == min(2 + number, 4)


def test_what_is_smaller_than_the_bound_stays() -> None:
    scale = torch.ones((), requires_grad=True)
    for bound, moves, stays in (
        ({}, 1024, 1023),
        ({"min_offload_bytes": 5}, 5, 4),
        ({"min_offload_bytes": 9000}, 9000, 8999),
    ):
        for mode in ("recompute", "offload_saved_tensors"):
            for nbytes, wanted in ((moves, -(-moves // 4096) * 4096), (stays, 0)):
                checkpointing = ActivationCheckpointing(
                    ActivationCheckpointingConfig(tier="host", mode=mode, **bound)
                )
                outputs = checkpointing(torch.mul, torch.ones(nbytes, dtype=torch.uint8), scale)
                assert checkpointing.used_bytes() == wanted, (bound, mode, nbytes)
                del outputs
