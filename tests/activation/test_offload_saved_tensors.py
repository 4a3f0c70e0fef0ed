"""Saved tensors are moved once a storage, views come back as views, parameters stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.activation.blocks import Stack, fresh_seed, gradients, same
from zero_ext.activation import ActivationCheckpointing
from zero_ext.config import ActivationCheckpointingConfig

HOST = {"mode": "offload_saved_tensors", "tier": "host", "min_offload_bytes": 0}


def test_views_of_one_storage_are_moved_once() -> None:
    torch.manual_seed(fresh_seed())
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    mixed = torch.randn(64, 192, requires_grad=True) * 1
    wanted = torch.autograd.grad((mixed.sin() * mixed.t().cos().t()).sum(), mixed, retain_graph=True)[0]
    with checkpointing.saved_tensors():
        out = mixed.sin() * mixed.t().cos().t()  # saves mixed, its transpose, and two results
    assert checkpointing.used_bytes() == 3 * mixed.nbytes
    found = torch.autograd.grad(out.sum(), mixed)[0]
    assert torch.equal(found, wanted)
    del out
    assert checkpointing.used_bytes() == 0


def test_a_function_that_returns_nothing() -> None:
    """Nothing runs again, so nothing needs to come out of it."""
    seen: list[torch.Tensor] = []
    inputs = torch.ones(64, 64, requires_grad=True)
    assert (
        ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))(lambda x: seen.append(x.sin()), inputs)
        is None
    )
    seen[0].sum().backward()
    assert torch.equal(inputs.grad, torch.ones(64, 64).cos())


def test_small_views_of_large_storages_are_moved_alone() -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    large = torch.randn(4096, 64)
    scale = torch.randn(64, 64, requires_grad=True)
    with checkpointing.saved_tensors():
        out = large[:64] * scale
    assert checkpointing.used_bytes() == 64 * 64 * 4
    out.sum().backward()
    assert torch.equal(scale.grad, large[:64])


def test_small_views_that_begin_inside_a_cache_line() -> None:
    """They come back as far behind its begin, with others before them."""
    torch.manual_seed(fresh_seed())
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    large = torch.randn(4096, 60)
    scale = torch.randn(64, 60, requires_grad=True)
    checkpointing(torch.mul, large[3:67], scale).sum().backward()
    assert torch.equal(scale.grad, large[3:67])


def test_memory_that_begins_between_elements() -> None:
    """As a file's bytes may, behind a header."""
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    values = torch.randn(1, 64)
    behind = torch.frombuffer(bytearray(b"!" + values.numpy().tobytes()), dtype=torch.float32, offset=1)
    scale = torch.ones(64, requires_grad=True)
    checkpointing(torch.mul, scale, behind).sum().backward()
    assert torch.equal(scale.grad, values[0])


def test_a_tensor_that_changes_between_two_uses_is_moved_twice() -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    weight = torch.ones(64, 64, requires_grad=True)
    factor = torch.full((64, 64), 2.0)
    with checkpointing.saved_tensors(nn.Module()):
        first = weight * factor
        factor.fill_(3.0)
        second = weight * factor
    (first + second).sum().backward()
    assert torch.equal(weight.grad, torch.full((64, 64), 5.0))


def test_parameters_stay() -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    block = nn.Linear(64, 64)
    inputs = torch.randn(64, 64, requires_grad=True) * 1
    out = checkpointing(block, inputs)
    assert checkpointing.used_bytes() == inputs.nbytes
    with torch.no_grad():
        block.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_parameters_that_a_closure_holds_stay() -> None:
    """No module tells whose weights these are, and what autograd saves of them is a view."""
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**HOST))
    weight = nn.Parameter(torch.randn(64, 64))
    inputs = torch.randn(64, 64, requires_grad=True) * 1
    out = checkpointing(lambda x: x @ weight.t() + x @ weight[:, :].view(64, 64), inputs)
    assert checkpointing.used_bytes() == inputs.nbytes
    del out
    recomputed = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host"))
    out = recomputed(torch.matmul, inputs, weight.t())
    assert recomputed.used_bytes() == inputs.nbytes
    out.sum().backward()


def test_the_context_alone_and_its_refusal(tmp_path: Path) -> None:
    seed, model = fresh_seed(), Stack(2)
    wanted = gradients(model, None, seed)
    values = {**HOST, "tier": "nvme", "nvme_paths": (str(tmp_path),)}
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**values))

    def direct(block: nn.Module, hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
        with checkpointing.saved_tensors(block):
            return block(hidden, **kwargs)

    for _ in range(2):
        assert same(gradients(model, direct, seed), wanted)
    with pytest.raises(
        ValueError, match=r"activation_checkpointing.tier: expected 'host' or 'nvme' .*, got 'device'"
    ):
        ActivationCheckpointing().saved_tensors()


def test_a_graph_without_backward_leaves_nothing() -> None:
    """Small results, which stay, are saved by the very ops that made them."""
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(mode="offload_saved_tensors", tier="host")
    )
    inputs = torch.randn(64, 64, requires_grad=True)
    with checkpointing.saved_tensors():
        out = (inputs * 1).norm().exp()
    assert checkpointing.used_bytes() == inputs.nbytes
    del out
    assert checkpointing.used_bytes() == 0


def test_gradients_of_gradients_through_small_results() -> None:
    torch.manual_seed(fresh_seed())
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(mode="offload_saved_tensors", tier="host")
    )
    inputs = torch.randn(64, 64, requires_grad=True)
    with checkpointing.saved_tensors():
        out = (inputs * 0.01).norm().exp()
    (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
    wanted = torch.autograd.grad((inputs * 0.01).norm().exp(), inputs, create_graph=True)[0]
    assert torch.equal(slope, wanted)
    again = torch.autograd.grad(slope.sum(), inputs)[0]
    assert torch.equal(again, torch.autograd.grad(wanted.sum(), inputs)[0])
    del slope, out
    assert checkpointing.used_bytes() == 0
