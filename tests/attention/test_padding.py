"""Inputs padded to whole blocks, and position embeddings lengthened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_ext.attention import extend_positions, pad_to_block, unpad


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_inputs_are_padded_and_outputs_cut(length: int) -> None:
    ids = torch.randint(1, 9, (2, length))
    inputs = {
        "input_ids": ids,
        "token_type_ids": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand(2, -1),
        "labels": ids,
        "cache_position": torch.arange(3),
    }
    found, added = pad_to_block(16, inputs, pad_token_id=9)
    assert added == -length % 16
    padded = length + added
    assert found["input_ids"].shape == (2, padded)
    assert torch.equal(unpad(added, found["input_ids"]), ids)
    assert found["cache_position"] is inputs["cache_position"]
    if added:
        assert bool((found["input_ids"][:, length:] == 9).all())
        assert bool((found["labels"][:, length:] == -100).all())
        assert bool((found["position_ids"][:, length:] == length - 1).all())
        assert not found["token_type_ids"][:, length:].any()
        assert torch.equal(found["attention_mask"].sum(dim=1), torch.tensor([length, length]))
    assert "attention_mask" not in inputs


@pytest.mark.parametrize(
    "labels", [torch.tensor([1, 0]), torch.rand(2, 3), torch.rand(2, 5), torch.rand(2), torch.tensor(1)]
)
def test_labels_that_are_not_of_tokens_stay(labels: torch.Tensor) -> None:
    found, added = pad_to_block(16, {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": labels})
    assert added == 11
    assert found["labels"] is labels


def test_labels_of_several_per_token_are_padded_along_the_tokens() -> None:
    labels = torch.randint(9, (2, 5, 3))
    found, _ = pad_to_block(16, {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": labels})
    assert found["labels"].shape == (2, 16, 3)
    assert torch.equal(found["labels"][:, :5], labels)
    assert bool((found["labels"][:, 5:] == -100).all())


def test_embeddings_are_padded() -> None:
    embeddings = nn.Embedding(10, 4)
    inputs = {"inputs_embeds": torch.randn(2, 5, 4), "attention_mask": torch.ones(2, 5, dtype=torch.bool)}
    found, added = pad_to_block(16, inputs, pad_token_id=3, embeddings=embeddings)
    assert added == 11
    assert torch.equal(found["inputs_embeds"][:, 5:], embeddings(torch.full((2, 11), 3)))
    zeros, _ = pad_to_block(16, inputs)
    assert not zeros["inputs_embeds"][:, 5:].any()
    assert zeros["attention_mask"].dtype == torch.bool


def test_what_cannot_be_padded() -> None:
    with pytest.raises(ValueError, match="inputs: expected input_ids or inputs_embeds"):
        pad_to_block(16, {"labels": torch.ones(1, 3)})
    ids = torch.ones(1, 3, dtype=torch.long)
    for name, shape in (("attention_mask", (1, 4)), ("attention_mask", (3,)), ("labels", (1, 2))):
        with pytest.raises(ValueError, match=f"{name}: expected length 3 in its second dim.*, got shape"):
            pad_to_block(16, {"input_ids": ids, name: torch.ones(shape, dtype=torch.long)})
    with pytest.raises(
        ValueError, match=r"attention_mask: expected shape \[batch, length\], got \(1, 3, 3\)"
    ):
        pad_to_block(16, {"input_ids": ids, "attention_mask": torch.ones(1, 3, 3)})
    for added in (-1, 3):
        with pytest.raises(ValueError, match="cut off an output of length 3"):
            unpad(added, torch.ones(1, 3))


@pytest.mark.parametrize("reserved", [0, 2])
def test_positions_repeat(reserved: int) -> None:
    embedding = nn.Embedding(reserved + 4, 3)
    before = embedding.weight.detach().clone()
    extend_positions(embedding, 10, reserved)
    after = embedding.weight.detach()
    assert after.shape == (reserved + 10, 3)
    assert torch.equal(after[: reserved + 4], before)
    for position in range(10):
        assert torch.equal(after[reserved + position], before[reserved + position % 4])
    assert embedding(torch.tensor([reserved + 9])).requires_grad
    with pytest.raises(ValueError, match=r"positions: expected at least .* 10 .*, got 4"):
        extend_positions(embedding, 4, reserved)
