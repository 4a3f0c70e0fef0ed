"""Attention within documents of packed rows: as separate sequences, and nothing leaks."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zero_ext import document_attention
from zero_ext.attention import documents_from_positions
from zero_ext.attention.packed_documents import positions_in_documents, restarts

HEADS, LENGTH, DIM = 4, 24, 8
DOCUMENTS = {
    "one": (1, [0, 24]),
    "packed": (1, [0, 1, 9, 24]),
    "rows": (2, [0, 24, 48]),
    "packed rows": (3, [0, 5, 24, 34, 48, 58, 72]),
}


def tensors(batch: int, key_heads: int = HEADS) -> list[torch.Tensor]:
    return [torch.randn(batch, each, LENGTH, DIM) for each in (HEADS, key_heads, key_heads)]


def dense_mask(batch: int, bounds: list[int], causal: bool) -> torch.Tensor:
    """Bool [batch, 1, length, length], by comparing all pairs of tokens."""
    document = torch.zeros(batch * LENGTH, dtype=torch.int64)
    document[bounds[1:-1]] = 1
    document = document.cumsum(0).view(batch, LENGTH)
    mask = document[:, :, None] == document[:, None]
    return (mask.tril() if causal else mask)[:, None]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("key_heads", [4, 2], ids=["heads", "grouped"])
@pytest.mark.parametrize(("batch", "bounds"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_it_is_attention_with_a_block_diagonal_mask(
    batch: int, bounds: list[int], key_heads: int, causal: bool
) -> None:
    inputs = [each.requires_grad_() for each in tensors(batch, key_heads)]
    gradient = torch.randn(batch, HEADS, LENGTH, DIM)
    found = document_attention(*inputs, bounds, is_causal=causal, scale=0.3, enable_gqa=key_heads < HEADS)
    gradients = torch.autograd.grad(found, inputs, gradient)
    reference = [each.detach().double().requires_grad_() for each in inputs]
    mask = dense_mask(batch, bounds, causal)
    wanted = F.scaled_dot_product_attention(*reference, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, wanted.float())
    for each, other in zip(gradients, torch.autograd.grad(wanted, reference, gradient.double()), strict=True):
        torch.testing.assert_close(each, other.float())


def test_a_document_does_not_depend_on_another_by_one_bit() -> None:
    bounds = [0, 5, 17, 24]
    inputs = tensors(1)
    before = document_attention(*inputs, bounds)
    for start, stop in pairwise(bounds):
        for tensor in inputs:
            changed = [each.clone() if each is tensor else each for each in inputs]
            for each, original in zip(changed, inputs, strict=True):
                if each is not original:
                    each[:, :, start:stop] += torch.randn(DIM)
            after = document_attention(*changed, bounds)
            assert not torch.equal(after[:, :, start:stop], before[:, :, start:stop])
            outside = torch.ones(LENGTH, dtype=torch.bool)
            outside[start:stop] = False
            assert torch.equal(after[:, :, outside], before[:, :, outside])


def test_no_scores_of_all_tokens_are_made() -> None:
    tokens, documents = 4096, 64
    inputs = [torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in range(3)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(each.numel()) or each, lambda x: x
    ):
        document_attention(*inputs, range(0, tokens + 1, tokens // documents))
    assert sum(saved) < 8 * tokens * 8


@pytest.mark.parametrize("kind", [torch.tensor, list, lambda each: torch.tensor(each, dtype=torch.int32)])
def test_bounds_may_be_a_list_or_integers(kind: Any) -> None:
    inputs = tensors(1)
    assert torch.equal(document_attention(*inputs, kind([0, 9, 24])), document_attention(*inputs, [0, 9, 24]))


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([1, 24, 48], ValueError, "expected 0 at the start, got 1"),
        ([0, 24, 12, 48], ValueError, "expected ascending numbers, got 12 after 24"),
        ([0, 24, 24, 48], ValueError, "expected ascending numbers, got 24 after 24"),
        ([0, 24], ValueError, "expected 48 at the end, the tokens of 2 rows of 24, got 24"),
        ([0, 24, 60], ValueError, "expected 48 at the end"),
        ([0, 30, 48], ValueError, "expected every row of 24 tokens to begin a document, got none at 24"),
        ([0], ValueError, "expected shape [documents + 1] with at least one document, got (1,)"),
        ([[0, 48]], ValueError, "expected shape [documents + 1]"),
        ([0, "end"], TypeError, "expected a tensor or list of integers, got list"),
        ([0.0, 48.0], TypeError, "expected integers, got torch.float32"),
    ],
)
def test_wrong_bounds(bounds: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"cu_seqlens: {re.escape(message)}"):
        document_attention(*tensors(2), bounds)


def test_wrong_shapes() -> None:
    query, key, value = tensors(1)
    with pytest.raises(ValueError, match=r"expected the same length, .* got 1, 24 and 24"):
        document_attention(query[:, :, :1], key, value, [0, 24])
    with pytest.raises(ValueError, match=r"expected \[batch, heads, length, head dim\] of one batch"):
        document_attention(query[0], key[0], value[0], [0, 24])


@pytest.mark.parametrize(
    ("positions", "mask", "bounds"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], None, [0, 4, 8]),
        ([[0, 1, 0, 1], [0, 0, 1, 2]], None, [0, 2, 4, 5, 8]),
        ([[0, 1, 2, 3]], [[1, 1, 1, 0]], [0, 3, 4]),
        ([[0, 1, 2, 3]], [[0, 0, 1, 1]], [0, 2, 4]),
        ([[1, 1, 0, 1]], [[0, 0, 1, 1]], [0, 1, 2, 4]),
        ([[0, 1, 2, 0, 1, 2]], [[1, 1, 0, 1, 1, 0]], [0, 2, 3, 5, 6]),
        ([[0, 1, 2, 3]], [[0, 0, 0, 0]], [0, 4]),
    ],
)
def test_documents_of_positions(positions: Any, mask: Any, bounds: list[int]) -> None:
    attended = None if mask is None else torch.tensor(mask)
    assert documents_from_positions(torch.tensor(positions), attended).tolist() == bounds


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([0, 1, 0, 1, 2, 3], [1, 1, 1, 0, 1, 1]),
        # Positions that count attended tokens only, and the same with 1 at padding.
        ([0, 1, 1, 1, 2, 3], [1, 1, 0, 0, 1, 1]),
        ([0, 1, 1, 2, 2, 3], [1, 1, 0, 1, 0, 1]),
        ([1, 0, 1, 2, 1, 3], [0, 1, 1, 1, 0, 1]),
    ],
)
def test_padding_inside_of_a_document(positions: list[int], mask: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"at the start or end of a document.* Begin them at 0 with each document"
    ):
        documents_from_positions(torch.tensor([positions]), torch.tensor([mask]))


def test_mask_of_another_shape() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"expected both \[batch, length\], got \(1, 6\) and \(1, 5\)"):
        documents_from_positions(positions, torch.ones(1, 5))


@pytest.mark.parametrize(("batch", "bounds"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_positions_in_documents(batch: int, bounds: list[int]) -> None:
    found = positions_in_documents(bounds, batch, LENGTH)
    wanted = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
    assert torch.equal(found, wanted.view(batch, LENGTH))
    assert documents_from_positions(found).tolist() == bounds


@pytest.mark.parametrize(
    ("positions", "mask", "begins"),
    [
        ([0, 1, 2, 3], None, []),
        ([0, 1, 2, 0, 1], None, [3]),
        ([0, 1, 2, 0], None, [3]),
        ([4, 5, 0, 1], None, [2]),
        ([0, 1, 0, 0, 1], None, [2, 3]),
        ([3, 2, 1, 0], None, []),
        ([0, 0, 0, 0], None, []),
        ([0, 1, 5, 6], None, []),
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], []),
        ([0, 1, 2, 1, 1], [1, 1, 1, 0, 0], []),
        ([0, 1, 1, 0, 1], [1, 1, 0, 1, 1], [3]),
        ([0, 1, 2, 3, 4], [1, 1, 0, 1, 1], []),
    ],
)
def test_restarts_of_positions(positions: list[int], mask: list[int] | None, begins: list[int]) -> None:
    attended = None if mask is None else torch.tensor([mask])
    found = restarts(torch.tensor([positions]), attended)
    assert found[0].nonzero().flatten().tolist() == begins
