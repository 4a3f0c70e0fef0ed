"""Parts of sequences exchanged for heads around attention: as one process that has the whole sequence."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import Course, alone, assert_same_steps, assert_same_values, mesh_of, mesh_of_one
from zero_ext.parallel import SequenceExchange, sequence_attention, shard_batch
from zero_ext.parallel.pipeline import LayerSpec, PipelineModule

BATCH, LENGTH, DIM, WIDTH = 2, 8, 4, 8


@functools.cache
def exchange_of(cp: int) -> SequenceExchange:
    return SequenceExchange(mesh_of(cp=cp), 30)


def full_tensors(heads: int, keys: int) -> list[torch.Tensor]:
    """Query, key, value and a gradient, the same on all ranks."""
    return [torch.randn(BATCH, each, LENGTH, DIM) for each in (heads, keys, keys, heads)]


@on_ranks(4)
@pytest.mark.parametrize("cp", [2, 4])
def test_an_exchange_moves_every_value_to_its_position_and_back(world: World, cp: int) -> None:
    exchange, (full, *_) = exchange_of(cp), full_tensors(8, 8)
    shard = full.chunk(cp, 2)[exchange.rank].clone().requires_grad_()
    before = exchange.traffic.bytes_sent["sequence"]
    query, *_ = exchange.enter(shard, shard, shard)
    assert torch.equal(query, full.chunk(cp, 1)[exchange.rank])
    assert exchange.traffic.bytes_sent["sequence"] - before == 3 * shard.nbytes * (cp - 1) // cp
    assert torch.equal(exchange.leave(query), shard)
    gradient = torch.randn_like(full)
    (found,) = torch.autograd.grad(query, shard, gradient.chunk(cp, 1)[exchange.rank])
    assert torch.equal(found, gradient.chunk(cp, 2)[exchange.rank])
    left = exchange.leave(query)
    (found,) = torch.autograd.grad(left, query, gradient.chunk(cp, 2)[exchange.rank])
    assert torch.equal(found, gradient.chunk(cp, 1)[exchange.rank])


@on_ranks(4)
@pytest.mark.parametrize(("cp", "heads", "keys"), [(2, 4, 4), (4, 8, 4), (4, 8, 2), (4, 4, 1), (4, 24, 6)])
def test_attention_is_that_of_full_sequences(world: World, cp: int, heads: int, keys: int) -> None:
    function = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    attention = sequence_attention(function, mesh_of(cp=cp), timeout_seconds=120.0)
    cp_rank = attention.exchange.rank
    *full, gradient = full_tensors(heads, keys)
    mine = [each.chunk(cp, 2)[cp_rank].clone().requires_grad_() for each in full]
    found = attention(*mine)
    found.backward(gradient.chunk(cp, 2)[cp_rank])
    reference = [each.double().requires_grad_() for each in full]
    wanted = function(*reference)
    wanted.backward(gradient.double())
    torch.testing.assert_close(found, wanted.chunk(cp, 2)[cp_rank].float())
    for each, other in zip(mine, reference, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(each.grad, other.grad.chunk(cp, 2)[cp_rank].float())


@on_ranks(2, stand_in=True)
def test_on_a_device_through_host_memory(world: World) -> None:
    mesh = DeviceMesh("stand_in", torch.arange(2), mesh_dim_names=("cp",))
    exchange, (full, *_) = SequenceExchange(mesh, 30), full_tensors(4, 4)
    shard = full.chunk(2, 2)[world.rank].to("stand_in").requires_grad_()
    query, *_ = exchange.enter(shard, shard, shard)
    query.sum().backward()
    assert torch.equal(query.cpu(), full.chunk(2, 1)[world.rank])
    assert shard.grad is not None and torch.equal(shard.grad.cpu(), torch.ones_like(shard, device="cpu"))


@on_ranks(4)
def test_what_does_not_fit_is_refused_by_all_ranks(world: World) -> None:
    attention = sequence_attention(F.scaled_dot_product_attention, mesh_of(cp=2), timeout_seconds=120.0)

    def attend(heads: int, keys: int, length: int) -> torch.Tensor:
        query = torch.ones(1, heads, length, DIM)
        return attention(query, *[torch.ones(1, keys, length, DIM)] * 2)

    with pytest.raises(
        ValueError, match=r"heads of queries on this rank: expected a multiple of 'cp' \(2\), got 3"
    ):
        attend(3, 3, 4)
    with pytest.raises(ValueError, match=r"heads of queries, keys and values: .* got 4, 3 and 3"):
        attend(4, 3, 4)
    unequal = (
        r"the same along 'cp', got \[1, 2, 4, 4, .* on rank 0, \[1, 2, 3, 4, .* on rank 1\. .*shard_batch"
    )
    with pytest.raises(ValueError, match=unequal):
        attend(2, 2, 4 - world.rank % 2)
    assert attend(2, 2, 4).shape == (1, 2, 4, DIM)  # and the ranks still understand each other
    with pytest.raises(ValueError, match=r"mesh: expected a dimension 'cp', got \['dp'\]"):
        sequence_attention(print, DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp",)))


@on_ranks(4)
def test_an_error_of_one_rank_ends_attention_on_all(world: World) -> None:
    def function(query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if world.rank % 2 == 0:
            raise ArithmeticError("out of luck")
        return query

    attention = sequence_attention(function, mesh_of(cp=2), timeout_seconds=120.0)
    with pytest.raises((ArithmeticError, RuntimeError), match=r"out of luck|has died"):
        attention(*[torch.ones(1, 2, 4, DIM)] * 3)


@on_ranks(4)
@pytest.mark.parametrize("labelled", ["labels", "shift_labels"])
def test_shards_of_a_batch_concatenate_to_the_batch(world: World, labelled: str) -> None:
    mesh = mesh_of(cp=4)
    words, mask = torch.randint(9, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.5, words, -100)
    batch = {"input_ids": words, "attention_mask": mask, labelled: labels, "numbers": torch.ones(3)}
    chunks = world.everyone(shard_batch(batch, mesh))
    wanted = labels if labelled == "shift_labels" else F.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.equal(torch.cat([chunk["input_ids"] for chunk in chunks], 1), words)
    assert torch.equal(torch.cat([chunk["position_ids"] for chunk in chunks], 1), torch.arange(LENGTH)[None])
    assert torch.equal(torch.cat([chunk["shift_labels"] for chunk in chunks], 1), wanted)
    assert all(torch.equal(chunk["attention_mask"], mask) and len(chunk["numbers"]) == 3 for chunk in chunks)
    assert all(float(chunk["num_items_in_batch"]) == int((wanted != -100).sum()) / 4 for chunk in chunks)


@on_ranks(4)
def test_labels_of_masked_tokens_stay_where_they_are(world: World) -> None:
    mesh, words = mesh_of(cp=4), torch.randint(9, (BATCH, LENGTH))
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.5, words, -100)
    chunks = world.everyone(shard_batch({"input_ids": words, "labels": labels}, mesh, shift_labels=False))
    assert torch.equal(torch.cat([chunk["labels"] for chunk in chunks], 1), labels)
    assert all("shift_labels" not in chunk for chunk in chunks)
    assert all(float(chunk["num_items_in_batch"]) == int((labels != -100).sum()) / 4 for chunk in chunks)


@on_ranks(4)
def test_positions_counted_from_padding(world: World) -> None:
    words = torch.tensor([[5, 6, 1, 7, 8, 9, 1, 1], [5, 6, 7, 8, 9, 5, 6, 7]])
    wanted = torch.tensor([[2, 3, 1, 4, 5, 6, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]])
    chunks = world.everyone(shard_batch({"input_ids": words}, mesh_of(cp=4), padding_idx=1))
    assert torch.equal(torch.cat([chunk["position_ids"] for chunk in chunks], 1), wanted)
    vectors = world.everyone(
        shard_batch({"inputs_embeds": torch.ones(2, 8, 3)}, mesh_of(cp=4), padding_idx=1)
    )
    assert torch.equal(torch.cat([chunk["position_ids"] for chunk in vectors], 1), wanted[1:])
    packed = {"input_ids": words, "position_ids": wanted.roll(3, 1)}
    with pytest.raises(ValueError, match="'position_ids': expected ones that increase by 1"):
        shard_batch(packed, mesh_of(cp=4), padding_idx=1)


@on_ranks(4)
@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([1, 1, 1, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1, 1, 1]),
        ([0, 1, 2, 3, 4, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]),
        ([0, 1, 1, 1, 2, 3, 4, 5], [1, 1, 0, 0, 1, 1, 1, 1]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_positions_of_padding_mean_nothing(world: World, positions: list[int], mask: list[int]) -> None:
    ids, attended = torch.tensor([positions]), torch.tensor([mask])
    batch = {"input_ids": torch.arange(8)[None], "position_ids": ids, "attention_mask": attended}
    chunks = world.everyone(shard_batch(batch, mesh_of(cp=2)))
    shards = [each["position_ids"] for each in chunks[world.rank // 2 * 2 :][:2]]
    assert torch.equal(torch.cat(shards, 1), ids)
    again = torch.where(attended > 0, ids % 2, ids)  # of several documents
    with pytest.raises(ValueError, match="'position_ids': expected ones that increase by 1"):
        shard_batch({**batch, "position_ids": again}, mesh_of(cp=2))


@on_ranks(4)
@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (7, {}, "expected a multiple of 'cp' (2), got 7 tokens. Pad them to 8"),
        (
            8,
            {"attention_mask": [1, 4]},
            "'attention_mask': expected shape (1, 8) or (1, 1, 8, 8), got (1, 4)",
        ),
        (8, {"labels": [1, 4]}, "'labels': expected shape (1, 8), got (1, 4)"),
        (8, {"position_ids": [1, 4]}, "'position_ids': expected shape (1, 8), got (1, 4)"),
        (8, {"position_ids": [1, 8]}, "'position_ids': expected ones that increase by 1"),
    ],
)
def test_batches_that_cannot_be_cut(world: World, length: int, changes: dict[str, Any], message: str) -> None:
    batch = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
    batch |= {name: torch.ones(shape, dtype=torch.int64) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        shard_batch(batch, mesh_of(cp=2))
    with pytest.raises(ValueError, match=r"batch: expected 'input_ids' .* got \['labels'\]"):
        shard_batch({"labels": torch.ones(1, 8)}, mesh_of(cp=2))


class Attending(nn.Module):
    """A residual layer of causal attention with two heads, by ``attend``."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend, self.project = attend, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chunks = self.project(hidden).unflatten(2, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        return hidden + self.attend(*chunks, is_causal=True).transpose(1, 2).flatten(2)


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_in_a_pipeline(world: World, schedule: str) -> None:
    mesh = mesh_of(pp=2, cp=2)
    attention = sequence_attention(F.scaled_dot_product_attention, mesh, timeout_seconds=120.0)
    torch.manual_seed(world.seed)
    layers = [LayerSpec(Attending, attention) for _ in range(4)]
    module = PipelineModule(layers, mesh, loss=F.mse_loss, schedule=schedule)
    course = Course(module, mesh, {"stage": 1}, micro_batches=2)
    torch.manual_seed(world.seed)
    layers = [LayerSpec(Attending, F.scaled_dot_product_attention) for _ in range(4)]
    reference = PipelineModule(layers, mesh_of_one(), loss=F.mse_loss)

    def loss(module: PipelineModule, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for layer in module.layers.values():
            hidden = layer(hidden)
        return F.mse_loss(hidden, wanted)

    data = torch.randn(3, 2, 4, LENGTH, WIDTH)
    found = course.steps(data.chunk(2, 3)[mesh["cp"].get_local_rank()])
    wanted = alone(reference, data, loss)
    assert_same_steps(tuple(found), tuple(wanted))
    assert_same_values(zero_ext.full_state_dict(course.model), reference.state_dict())
