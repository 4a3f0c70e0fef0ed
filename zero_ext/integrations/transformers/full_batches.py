"""Models with sharded sequences that are called with full batches. Each rank computes its shard."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import PreTrainedModel

from zero_ext.attention.packed_documents import is_discontinuous
from zero_ext.integrations.transformers.document_interface import NAME as DOCUMENTS
from zero_ext.integrations.transformers.document_interface import (
    attended_positions,
    counts_attended,
    padding_position,
)
from zero_ext.integrations.transformers.sequence_interface import predicts_masked
from zero_ext.parallel.batch_sharding import shard_batch
from zero_ext.parallel.ring import chunk_count, shard_positions
from zero_ext.parallel.ulysses import SequenceExchange

_ATTRIBUTE = "_zero_ext_full_batches"
_IGNORED = -100
_SAME_BATCHES = (
    "All ranks along 'cp' need the same samples in the same order. Set one seed on all ranks, and prepare "
    "the loader with the accelerator."
)


def accept_full_batches(
    model: nn.Module, inner: PreTrainedModel, exchange: SequenceExchange, mesh: DeviceMesh
) -> None:
    """Have a model with sharded sequences cut the full batches that it is called with, in place.

    All ranks along "cp" call it with the same batch. Sequences are padded to the length that `shard_batch`
    needs. The loss is that of the full batch on every rank, divided by `num_items_in_batch` of the full batch
    if that is given. Other outputs are those of this rank's tokens.

    Args:
        model: is called, `inner` or adapters on it.
        inner: has the attention that `apply_sequence_parallel` has changed.
        exchange: of that function.
        mesh: of that function.
    """
    batches = _FullBatches(inner, exchange, mesh, inner.config._attn_implementation.endswith(DOCUMENTS))
    # Before the check of shards, which apply_sequence_parallel has registered.
    model.register_forward_pre_hook(batches.before, with_kwargs=True, prepend=True)
    model.register_forward_hook(batches.after, with_kwargs=True)
    setattr(model, _ATTRIBUTE, batches)


def accepts_full_batches(model: nn.Module) -> bool:
    """Return whether :func:`accept_full_batches` has changed `model`."""
    return hasattr(model, _ATTRIBUTE)


def gather_outputs(model: nn.Module, outputs: Any, length: int) -> Any:
    """Return outputs of the full sequences; a collective of the ranks along "cp".

    Args:
        model: of :func:`accept_full_batches`.
        outputs: tensors [batch, tokens of this rank, ...], in tuples, lists and mappings.
        length: tokens of the full sequences, without what was added to them.

    Returns:
        The same with tensors [batch, length, ...].

    Raises:
        ValueError: a tensor has another shape.
    """
    batches: _FullBatches = getattr(model, _ATTRIBUTE)
    return batches.gathered(outputs, length)


class _FullBatches:
    def __init__(
        self, model: PreTrainedModel, exchange: SequenceExchange, mesh: DeviceMesh, documents: bool
    ) -> None:
        self._exchange, self._mesh, self._documents = exchange, mesh, documents
        self._masked, self._padding = predicts_masked(model), padding_position(model)
        self._counts_attended = counts_attended(model)
        self._causal = model.can_generate()
        # Not that of the configuration, which may be -1 or behind the last embedding. Nothing attends to it.
        self._pad_token = self._padding or 0
        self._position_limit = _position_limit(model)
        self._multiple = math.lcm(exchange.size, chunk_count(exchange.ring))

    def __deepcopy__(self, memo: dict[int, Any]) -> _FullBatches:
        return self  # a copied model has the same ranks

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Return this rank's shard of the inputs; ``ValueError`` on all ranks if one refuses them."""
        inputs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        inputs = {name: value for name, value in inputs.items() if value is not None}
        problem, shards = "", inputs
        try:
            shards = self._cut(inputs)
        except ValueError as error:  # raised after the comparison, for which the other ranks wait
            problem = str(error)
        what = "hash of the batch"
        self._exchange.agree([_checksum(inputs)], what, problem, fix=_SAME_BATCHES)
        return (), shards

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return outputs with the loss of the full batch."""
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return None
        if isinstance(outputs, tuple):
            return (self._exchange.mean(outputs[0]), *outputs[1:])
        outputs["loss"] = self._exchange.mean(outputs["loss"])
        return outputs

    def gathered(self, outputs: Any, length: int) -> Any:
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.gathered(each, length) for each in outputs)
        if isinstance(outputs, Mapping):
            return {name: self.gathered(each, length) for name, each in outputs.items()}
        exchange, full = self._exchange, length + -length % self._multiple
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) < 2 or shape[1] * exchange.size != full:
            raise ValueError(
                f"outputs: expected tensors [batch, {full // exchange.size}, ...] of this rank's tokens, got "
                f"{shape or type(outputs).__name__}. Name the others in ignore_keys, or pass "
                "prediction_loss_only=True."
            )
        ranks = range(exchange.size)
        positions = [shard_positions(full, rank, exchange.size, exchange.ring) for rank in ranks]
        return exchange.gather_sequences(outputs, positions)[:, :length]

    def _cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values: expected none with sequences over ranks, got some, as of generation. "
                "Use a model without parallel.cp for generation."
            )
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if isinstance(tokens, torch.Tensor) and tokens.ndim >= 2:
            mask = inputs.get("attention_mask")
            if self._counts_attended and "position_ids" not in inputs and mask is not None and mask.ndim == 2:
                inputs = {**inputs, "position_ids": attended_positions(mask)}
            if not self._documents and self._is_packed(inputs, tokens):
                raise ValueError(
                    "position_ids: expected one document per row, got some that begin anew (packed rows). "
                    "Call apply_document_attention(model) before the model is sharded."
                )
            inputs = self._padded(inputs, tokens)
        return shard_batch(
            inputs,
            self._mesh,
            shift_labels=not self._masked,
            padding_idx=self._padding,
            ring=self._exchange.ring,
            packed=self._documents,
        )

    def _is_packed(self, inputs: dict[str, Any], tokens: torch.Tensor) -> bool:
        """Return whether positions begin anew, and no mask of tokens × tokens keeps documents apart."""
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if positions is None or positions.ndim != 2 or (mask is not None and mask.ndim != 2):
            return False
        return is_discontinuous(positions.expand(tokens.shape[:2]), mask, self._padding)

    def _padded(self, inputs: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
        """Return inputs with padding at the end of the sequences, to a length that divides."""
        batch, length = tokens.shape[:2]
        extra = -length % self._multiple
        if not extra:
            return inputs
        for name in ("attention_mask", "cu_seq_lens_q"):
            value = inputs.get(name)
            if isinstance(value, torch.Tensor) and value.ndim != 2:
                raise ValueError(
                    f"length of sequences: expected a multiple of {self._multiple} with this {name}, got "
                    f"{length}. Pad the sequences, with -100 as labels."
                )
        found = dict(inputs)
        positions = found.get("position_ids")
        limit = self._position_limit if self._padding is None else None  # of positions, if they exceed it
        if limit is not None and extra < limit - (length - 1 if positions is None else int(positions.max())):
            limit = None
        # Padding would be attended to, or needs positions that only a mask allows.
        if "attention_mask" not in found and (limit is not None or not self._causal):
            found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64, device=tokens.device)
        fill = {"labels": _IGNORED, "shift_labels": _IGNORED, "input_ids": self._pad_token}
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length:
                ends = (0, 0) * (value.ndim - 2) + (0, extra)
                found[name] = F.pad(value, ends, value=fill.get(name, 0))
        if positions is None and limit is not None:
            positions = torch.arange(length, dtype=torch.int64, device=tokens.device)[None]
        if positions is not None:
            added = positions[:, -1:] + torch.arange(1, extra + 1, device=tokens.device)
            added = added if limit is None else added.clamp(max=limit - 1)
            found["position_ids"] = torch.cat((positions, added), 1)
        return found


def _position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions that a model has embeddings of, None if it computes them."""
    tables = (name for name, each in model.named_modules() if isinstance(each, nn.Embedding))
    names = {name.rpartition(".")[2] for name in tables}
    if not any("pos" in name or name == "wpe" for name in names):
        return None
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    return limit


def _checksum(inputs: Mapping[str, Any]) -> int:
    """Return a checksum of all tensors, by which ranks compare their batches."""
    found = 0
    for name, value in sorted(inputs.items()):
        if isinstance(value, torch.Tensor):
            found = zlib.crc32(f"{name} {tuple(value.shape)}".encode(), found)
            found = zlib.crc32(value.detach().reshape(-1).view(torch.uint8).cpu().numpy().data, found)
    return found
