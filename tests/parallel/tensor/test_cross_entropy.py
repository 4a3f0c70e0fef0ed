"""Cross entropy over a split vocabulary: as torch's over the whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import mesh_of
from zero_ext.parallel import vocabulary_cross_entropy


@on_ranks(4)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(16, "float64"), (15, "float64"), (16, "bfloat16")])
def test_values_and_gradients_are_torchs(world: World, vocabulary: int, dtype: str) -> None:
    mesh = mesh_of(tp=4)["tp"]
    generator = torch.Generator().manual_seed(world.seed)
    full = 30 * torch.randn(3, 7, vocabulary, generator=generator, dtype=torch.float64)
    full = full.to(getattr(torch, dtype))
    targets = torch.randint(vocabulary, (3, 7), generator=generator)
    targets[0, :4], targets[1, 0] = -1, vocabulary - 1
    split = distribute_tensor(full, mesh, [Shard(2)]).requires_grad_()
    full = full.double().requires_grad_()
    found = vocabulary_cross_entropy(split, targets, ignore_index=-1)
    (3 * found).backward()
    wanted = torch.nn.functional.cross_entropy(full.flatten(0, 1), targets.flatten(), ignore_index=-1)
    (3 * wanted).backward()
    exact = dtype == "float64"
    assert found.dtype == (torch.float64 if exact else torch.float32)
    torch.testing.assert_close(
        found.detach().double(), wanted.detach(), rtol=1e-12 if exact else 1e-5, atol=0
    )
    assert isinstance(split.grad, DTensor)
    assert full.grad is not None
    tolerance = {"rtol": 1e-10, "atol": 1e-15} if exact else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(split.grad.full_tensor().double(), full.grad, **tolerance)


@on_ranks(4)
def test_what_it_refuses(world: World) -> None:
    mesh = mesh_of(tp=2)["tp"]
    full, targets = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    for logits in (full, distribute_tensor(full, mesh, [Replicate()])):
        with pytest.raises(
            ValueError, match="logits: expected a DTensor split along its last dimension, got "
        ):
            vocabulary_cross_entropy(logits, targets)
    split = distribute_tensor(full, mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"targets: expected shape .* got \(2,\)"):
        vocabulary_cross_entropy(split, targets[:2])
    with pytest.raises(RuntimeError, match="outside of the vocabulary of 8"):
        vocabulary_cross_entropy(split, targets + 8)
    assert vocabulary_cross_entropy(split, targets - 100).isnan()
