"""Inputs padded to whole blocks and outputs cut again, and position embeddings for longer sequences."""

from __future__ import annotations

import torch
from torch import nn


def pad_to_block(
    block: int, inputs: dict[str, torch.Tensor], *, pad_token_id: int = 0, embeddings: nn.Module | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """Lengthen every sequence of a model's inputs at its end to whole blocks.

    Attention here takes any length: padding saves nothing but a shorter last block, and gives inputs of few
    different shapes. An attention mask is made where there is none, so that nothing attends to the padding.
    Labels get -100, which losses leave out. Labels that are not of tokens (floats, or a number for each
    sample) stay as they are.

    Args:
        block: tokens of a block.
        inputs: by name, [batch, length]: input_ids, attention_mask, token_type_ids, position_ids; integer
            labels of [batch, length, ...]; inputs_embeds, [batch, length, width]. Others are passed on.
        pad_token_id: id that input_ids are padded with.
        embeddings: gives inputs_embeds their padding, from ids of pad_token_id; zeros without it.

    Returns:
        The padded inputs, new tensors where something was added, and the number of tokens added.

    Raises:
        ValueError: there is neither input_ids nor inputs_embeds, a length differs, or a tensor has more dims
            than it is padded in.
    """
    leading = [name for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
    if not leading:
        raise ValueError(
            f"inputs: expected input_ids or inputs_embeds among them, got {sorted(inputs)}. Pass one of "
            "the two."
        )
    batch, length = inputs[leading[0]].shape[:2]
    added = -length % block
    if added == 0:
        return dict(inputs), 0
    fills = {"input_ids": pad_token_id, "attention_mask": 0, "token_type_ids": 0, "labels": -100}
    found = dict(inputs)
    if found.get("attention_mask") is None:
        device = inputs[leading[0]].device
        found["attention_mask"] = torch.ones(batch, length, dtype=torch.long, device=device)
    for name in (*fills, "position_ids", "inputs_embeds"):
        tensor = found.get(name)
        if tensor is None or (name == "labels" and (tensor.ndim < 2 or tensor.is_floating_point())):
            continue
        if tensor.ndim < 2 or tensor.shape[1] != length:
            raise ValueError(
                f"{name}: expected length {length} in its second dim, as in {leading[0]}, got shape "
                f"{tuple(tensor.shape)}. Pass tensors of one length."
            )
        if name not in ("labels", "inputs_embeds") and tensor.ndim > 2:
            raise ValueError(
                f"{name}: expected shape [batch, length], got {tuple(tensor.shape)}. Pad it yourself."
            )
        if name == "inputs_embeds":
            found[name] = torch.cat((tensor, _padding_embeds(tensor, added, pad_token_id, embeddings)), dim=1)
        elif name == "position_ids":
            found[name] = torch.cat((tensor, tensor[:, -1:].expand(-1, added)), dim=1)
        else:
            fill = tensor.new_full((tensor.shape[0], added, *tensor.shape[2:]), fills[name])
            found[name] = torch.cat((tensor, fill), dim=1)
    return found, added


def _padding_embeds(
    like: torch.Tensor, added: int, pad_token_id: int, embeddings: nn.Module | None
) -> torch.Tensor:
    if embeddings is None:
        return like.new_zeros(like.shape[0], added, *like.shape[2:])
    ids = torch.full((like.shape[0], added), pad_token_id, dtype=torch.long, device=like.device)
    padding: torch.Tensor = embeddings(ids)
    return padding.to(like.dtype)


def unpad(added: int, output: torch.Tensor) -> torch.Tensor:
    """Return `output` without its `added` last tokens.

    Args:
        added: number of tokens, as `pad_to_block` returned it.
        output: [batch, length, ...].

    Returns:
        A view of `output`.

    Raises:
        ValueError: `output` is not longer than that.
    """
    if added < 0 or added >= output.shape[1]:
        raise ValueError(
            f"added: expected 0 to {output.shape[1] - 1} tokens to cut off an output of length "
            f"{output.shape[1]}, got {added}. Pass what pad_to_block returned."
        )
    return output[:, : output.shape[1] - added]


def extend_positions(embedding: nn.Embedding, positions: int, reserved: int = 0) -> None:
    """Lengthen a learnt position embedding in place, by repeating its rows.

    Position p takes the row of p modulo the rows there are, so that a model reads every stretch of its former
    length as before, from which training goes on.

    Args:
        embedding: [positions, width]; its weight is replaced by a new parameter.
        positions: number of rows, without the reserved ones.
        reserved: rows at the start that stay in front (RoBERTa has 2).

    Raises:
        ValueError: `positions` are fewer than there are, or nothing but reserved rows is there.
    """
    rows = embedding.num_embeddings - reserved
    if rows < 1 or positions < rows:
        raise ValueError(
            f"positions: expected at least the rows of the embedding, {rows} without the {reserved} "
            f"reserved ones, and at least one row, got {positions}. Pass more positions, or fewer reserved "
            "rows."
        )
    old = embedding.weight
    source_rows = torch.arange(positions, device=old.device) % rows + reserved
    with torch.no_grad():
        weight = torch.cat((old[:reserved], old[source_rows]))
    embedding.weight = nn.Parameter(weight, requires_grad=old.requires_grad)
    embedding.num_embeddings = reserved + positions
