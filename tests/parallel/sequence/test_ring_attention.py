"""Ring attention, alone and with exchanged heads: as one process that has the whole sequence."""

from __future__ import annotations

import re
import unittest.mock
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import mesh_of
from zero_ext.attention import document_attention
from zero_ext.attention.tile_attention import tile_kernel
from zero_ext.parallel import RingAttention, SequenceExchange, ring_attention, shard_batch, shard_indices

BATCH, LENGTH, DIM = 2, 48, 8
PACKED = [0, 5, 29, 48, 60, 61, 96]


@cache
def attention_of(cp: int, ring: int) -> RingAttention:
    return ring_attention(mesh_of(cp=cp), ring=ring, timeout_seconds=120.0)


def full_tensors(heads: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and a gradient, the same on all ranks."""
    return [torch.randn(BATCH, each, LENGTH, DIM, dtype=dtype) for each in (heads, keys, keys, heads)]


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("cp", "ring", "heads", "keys", "bounds", "causal"),
    [
        (4, 4, 3, 3, None, True),
        (4, 4, 3, 1, PACKED, True),
        (4, 2, 4, 2, None, True),
        (4, 2, 2, 1, PACKED, True),
        (4, 1, 4, 2, PACKED, True),
        (4, 4, 1, 1, None, False),
        (4, 2, 2, 2, PACKED, False),
        (2, 2, 5, 5, PACKED, True),
    ],
    ids=str,
)
def test_attention_is_that_of_full_sequences(
    world: World, cp: int, ring: int, heads: int, keys: int, bounds: list[int] | None, causal: bool
) -> None:
    attention, indices = attention_of(cp, ring), shard_indices(LENGTH, mesh_of(cp=cp), ring)
    *full, gradient = full_tensors(heads, keys)
    mine = [each[:, :, indices].requires_grad_() for each in full]
    found = attention(*mine, bounds, is_causal=causal)
    found.backward(gradient[:, :, indices])
    reference = [each.double().requires_grad_() for each in full]
    documents = bounds or range(0, (BATCH + 1) * LENGTH, LENGTH)
    wanted = document_attention(*reference, documents, is_causal=causal, enable_gqa=True)
    wanted.backward(gradient.double())
    torch.testing.assert_close(found, wanted[:, :, indices].float(), rtol=1e-5, atol=1e-5)
    for each, other in zip(mine, reference, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(each.grad, other.grad[:, :, indices].float(), rtol=1e-5, atol=1e-5)


@on_ranks(4)
@pytest.mark.parametrize(("ring", "dtype"), [(4, "float32"), (2, "float32"), (4, "bfloat16")])
def test_bytes_are_those_of_the_formula(world: World, ring: int, dtype: str) -> None:
    attention, heads, keys = attention_of(4, ring), 4, 2
    indices = shard_indices(LENGTH, mesh_of(cp=4), ring)
    *inputs, _ = full_tensors(heads, keys, getattr(torch, dtype))
    mine = [each[:, :, indices].requires_grad_() for each in inputs]
    traffic = attention.exchange.traffic
    traffic.begin_step()
    found = attention(*mine)
    # Keys and values of this rank's heads and its group's shard of the tokens.
    rotated = 2 * BATCH * keys * (LENGTH // 4) * DIM
    assert traffic.bytes_sent["ring"] == (ring - 1) * rotated * inputs[0].itemsize
    exchanged = 4 // ring
    moved = BATCH * (2 * heads + 2 * keys) * (LENGTH // 4) * DIM * inputs[0].itemsize
    assert traffic.bytes_sent["sequence"] == moved * (exchanged - 1) // exchanged
    traffic.begin_step()
    found.float().sum().backward()
    assert traffic.bytes_sent["ring"] == rotated * ((ring - 1) * inputs[0].itemsize + ring * 4)
    assert traffic.bytes_sent["sequence"] == moved * (exchanged - 1) // exchanged


@on_ranks(4)
@pytest.mark.parametrize("ring", [2, 4])
def test_causal_work_is_the_same_on_all_ranks(world: World, ring: int) -> None:
    """A rank has as many pairs of tokens as any other."""
    indices = shard_indices(LENGTH, mesh_of(cp=4), ring)
    exchanged = 4 // ring
    pairs = torch.tensor(world.everyone(int((indices + 1).sum()))).view(ring, exchanged).sum(1)
    assert pairs.tolist() == [LENGTH * (LENGTH + 1) // 2 // ring] * ring
    everything = torch.cat(world.everyone(indices)).sort().values
    assert torch.equal(everything, torch.arange(LENGTH))


@on_ranks(4)
def test_a_document_does_not_depend_on_another_by_one_bit(world: World) -> None:
    attention, indices = attention_of(4, 4), shard_indices(LENGTH, mesh_of(cp=4), 4)
    *inputs, _ = full_tensors(1, 1)
    outside = (indices < 5) | (indices >= 29)
    before = attention(*(each[:, :, indices] for each in inputs), PACKED)
    for each in inputs:
        each[0, :, 5:29] += torch.randn(DIM)
    after = attention(*(each[:, :, indices] for each in inputs), PACKED)
    assert not torch.equal(after[0, :, ~outside], before[0, :, ~outside])
    assert torch.equal(after[0, :, outside], before[0, :, outside])
    assert torch.equal(after[1], before[1])


@on_ranks(4)
def test_autocast_and_half_precision(world: World) -> None:
    attention, indices = attention_of(4, 2), shard_indices(LENGTH, mesh_of(cp=4), 2)
    *full, _ = full_tensors(2, 2)
    mine = [each[:, :, indices].requires_grad_() for each in full]
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*mine)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    wanted = document_attention(*full, [0, LENGTH, 2 * LENGTH])[:, :, indices]
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in mine)


@on_ranks(4)
def test_wrong_inputs_are_refused_by_all_ranks(world: World) -> None:
    attention = attention_of(4, 2)

    def attend(
        heads: int = 2, length: int = 12, bounds: Any = None, width: int = DIM, **options: Any
    ) -> torch.Tensor:
        query = torch.ones(1, heads, length, DIM, **options)
        return attention(query, query, torch.ones(1, heads, length, width, **options), bounds)

    for options, message in (
        ({"heads": 3}, "expected a multiple of 'cp' / ring (2), got 3"),
        ({"bounds": [1, 48]}, "cu_seqlens: expected 0 at the start, got 1"),
        ({"bounds": [0, 7]}, "cu_seqlens: expected 48 at the end"),
        ({"bounds": [0, 40 + world.rank, 48]}, "expected the same along 'cp'"),
        ({"width": DIM // 2}, "expected one head dim, got 8, 8 and 4"),
        ({"length": 11 + world.rank % 2}, "expected the same along 'cp'"),
        ({"dtype": (torch.float32, torch.bfloat16)[world.rank % 2]}, "expected the same along 'cp'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            attend(**options)
    theirs = "rank 1 of 'cp': it refused its shard of the sequence"
    three, four = torch.ones(2, 12, DIM), torch.ones(1, 2, 12, DIM)
    mine = world.rank == 1
    for query, wrong, message in (
        (four, [[0], [12, 48]], "cu_seqlens: expected a tensor or list of integers, got list"),
        (four, ["48"], "cu_seqlens: expected a tensor or list of integers, got list"),
        (three, [0, 48], "query, key and value: expected [batch, heads, length, head dim]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message if mine else theirs)):
            attention(*[query if mine else four] * 3, wrong if mine else [0, 48])
    assert attend().shape == (1, 2, 12, DIM)  # and the ranks still understand each other
    for ring in (0, 3, True, 8):
        with pytest.raises(ValueError, match=re.escape(f"ring: expected a divisor of 'cp' (4), got {ring}")):
            SequenceExchange(mesh_of(cp=4), ring=ring)
    with pytest.raises(ValueError, match=r"a multiple of 'cp' \(4\) and 2 × ring \(8\), got 12 tokens"):
        shard_indices(12, mesh_of(cp=4), 4)


@on_ranks(4)
def test_an_error_in_backward_ends_it_on_all_ranks(world: World) -> None:
    attention = ring_attention(mesh_of(cp=4), timeout_seconds=120.0)
    query = torch.ones(1, 1, 4, DIM, requires_grad=True)
    found = attention(query, query, query)
    error = ArithmeticError("out of luck") if world.rank == 1 else None
    kernel = "zero_ext.parallel.ring.tile_kernel"
    with (
        unittest.mock.patch(kernel, wraps=tile_kernel, side_effect=error),
        pytest.raises((ArithmeticError, RuntimeError), match=r"out of luck|has died"),
    ):
        found.sum().backward()


@on_ranks(4)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_packed_batches_are_cut_with_their_documents(world: World, ring: int) -> None:
    mesh = mesh_of(cp=4)
    words = torch.randint(9, (BATCH, LENGTH))
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(PACKED)])
    batch = {"input_ids": words, "labels": words, "position_ids": positions.view(BATCH, LENGTH)}
    shards = world.everyone(shard_batch(batch, mesh, ring=ring, packed=True))
    order = torch.cat(world.everyone(shard_indices(LENGTH, mesh, ring)))
    labels = words.clone().view(-1)
    labels[PACKED[:-1]] = -100
    shifted = torch.nn.functional.pad(labels.view(BATCH, LENGTH), (0, 1), value=-100)[:, 1:]
    for name, wanted in (("input_ids", words), ("position_ids", batch["position_ids"]), ("labels", shifted)):
        assert torch.equal(torch.cat([each[name] for each in shards], 1), wanted[:, order]), name
    for shard in shards:
        assert shard["cu_seq_lens_q"].tolist() == PACKED
        assert float(shard["num_items_in_batch"]) == int((shifted != -100).sum()) / 4
        assert int(shard["sequence_ring"]) == ring
    del batch["position_ids"]
    batch["cu_seq_lens_q"] = torch.tensor(PACKED)
    for shard in world.everyone(shard_batch(batch, mesh, ring=ring, packed=True)):
        assert shard["cu_seq_lens_q"].tolist() == PACKED
    for padding, first in ((None, 0), (1, 2)):  # RoBERTa counts from the number behind padding
        again = shard_batch(batch, mesh, ring=ring, packed=True, padding_idx=padding)["position_ids"]
        assert torch.equal(again, shards[world.rank]["position_ids"] + first)


@on_ranks(4)
def test_shifted_labels_cross_no_documents(world: World) -> None:
    """Tokens before another document lose their label, tokens before padding do not."""
    mesh, labels = mesh_of(cp=4), torch.randint(9, (1, 16))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]])
    mask = (torch.arange(16) < 14).long()[None]
    batch = {"input_ids": labels, "shift_labels": labels, "position_ids": positions, "attention_mask": mask}
    shards = world.everyone(shard_batch(batch, mesh, packed=True))
    wanted = labels.clone()
    wanted[0, [4, 11]] = -100
    assert torch.equal(torch.cat([each["shift_labels"] for each in shards], 1), wanted)
    assert torch.equal(torch.cat([each["labels"] for each in shards], 1), wanted)
    assert float(shards[0]["num_items_in_batch"]) == 14 / 4
    del batch["shift_labels"]
    shards = world.everyone(shard_batch({**batch, "labels": labels.roll(1, 1)}, mesh, packed=True))
    wanted[0, 15] = -100  # the last token of the row has no next one
    assert torch.equal(torch.cat([each["shift_labels"] for each in shards], 1), wanted)
    assert bool((labels >= 0).all())


@on_ranks(4)
def test_padding_of_positions_inside_of_a_sequence(world: World) -> None:
    words = torch.full((1, 16), 5)
    words[0, 7] = 1
    with pytest.raises(ValueError, match="expected padding at the start or end of a document"):
        shard_batch({"input_ids": words}, mesh_of(cp=4), ring=2, padding_idx=1)
    words[0, 7:] = 1
    shard = shard_batch({"input_ids": words}, mesh_of(cp=4), ring=2, padding_idx=1)
    assert shard["cu_seq_lens_q"].tolist()[:2] == [0, 7]


@on_ranks(4)
def test_documents_that_cannot_be_cut(world: World) -> None:
    words = torch.ones(1, 16, dtype=torch.int64)
    mask, holes = torch.ones(1, 16), torch.ones(1, 16)
    holes[0, 5] = 0
    for changes, options, message in (
        ({"cu_seq_lens_q": torch.tensor([0, 16])}, {}, "expected none without packed, got 1 documents"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, {"packed": True}, "cu_seqlens: expected 16 at the end"),
        ({"position_ids": torch.arange(16)[None] % 5}, {"ring": 2}, "pass packed=True, or"),
        ({"attention_mask": holes}, {"ring": 2}, "expected padding at the start or end of a document"),
        (
            {"attention_mask": holes, "cu_seq_lens_q": torch.tensor([0, 16])},
            {"packed": True},
            "'cu_seq_lens_q': expected no padding with them",
        ),
        (
            {"attention_mask": mask[:, None, None].expand(1, 1, 16, 16)},
            {"ring": 4},
            "'attention_mask': expected [batch, length] with packed or a ring, got (1, 1, 16, 16)",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            shard_batch({"input_ids": words, **changes}, mesh_of(cp=4), **options)
