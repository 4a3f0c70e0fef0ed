"""Packed sequences in Hugging Face models: attention within documents, through transformers' registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_ext.attention import SparseSelfAttention, document_attention, documents_from_positions
from zero_ext.attention.packed_documents import positions_in_documents
from zero_ext.integrations.adapter_checks import refuse_prompts
from zero_ext.integrations.prepare_with_features import outermost_models
from zero_ext.integrations.transformers.attention_interface import (
    check_full_attention,
    is_cross,
    own_configurations,
    registry_attentions,
)
from zero_ext.parallel.batch_sharding import mask_first_labels, mask_last_labels

NAME = "zero_ext_documents"
_MARK = "_zero_ext_passes_documents"
UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "head_mask", "position_bias")


def apply_document_attention(model: torch.nn.Module) -> None:
    """Make a model attend within the documents of packed rows, in place.

    Documents are those of `cu_seq_lens_q` in the model's inputs, or else begin where `position_ids` do not
    increase by 1. Missing `position_ids` count from the start of each document. No mask of tokens × tokens is
    made. Padding at the start or end of a document, given by an `attention_mask` [batch, length], is no part
    of it. A model that predicts the next token ignores `labels` of a document's first token, which another
    document would predict, and `shift_labels` of a token that precedes another document.

    Call it before [`apply_sequence_parallel`][zero_ext.integrations.apply_sequence_parallel] and
    [`prepare`][zero_ext.prepare]. `model.set_attn_implementation("sdpa")` undoes it, as generation needs.

    Args:
        model: any model that looks its attention up in transformers' registry, or a module around such
            models, as PEFT's adapters are.

    Raises:
        ValueError: there is no such model. Or it has cross-attention, sparse attention, windows, attention of
            its own, a forward without `position_ids` or further keyword arguments, sequences that are sharded
            already, or prompts of PEFT. Nothing was changed.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from zero_ext.integrations.transformers import apply_document_attention
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        >>> apply_document_attention(model)
        >>> words, positions = torch.arange(6)[None], torch.tensor([[0, 1, 2, 3, 0, 1]])
        >>> model(words, position_ids=positions).logits.shape
        torch.Size([1, 6, 50])
    """
    models = list(outermost_models(model).values())
    if not models:
        raise ValueError(
            f"{type(model).__name__}: expected a model of transformers, got none. Call document_attention in "
            "its attention."
        )
    refuse_prompts(model)
    for each in models:
        if problem := _problem_of(each):
            raise ValueError(f"{type(each).__name__}: {problem}")
        check_full_attention(each)
    own_configurations(model)  # of all of it: what is around them holds them too
    for each in models:
        each.set_attn_implementation(NAME)
        first = padding_position(each)
        _pass_documents(each, 0 if first is None else first + 1)


def has_document_attention(model: torch.nn.Module) -> bool:
    """Return whether :func:`apply_document_attention` has changed a model in ``model``."""
    return any(_MARK in vars(module) for module in model.modules())


def _problem_of(model: PreTrainedModel) -> str | None:
    """Return why :func:`apply_document_attention` refuses a model of transformers; None if it does not."""
    attentions: list[Any] = registry_attentions(model)
    forward = inspect.signature(model.forward).parameters
    problem: str | None = None
    if not attentions:
        problem = (
            "expected attention from transformers' registry, got its own. Call document_attention in it."
        )
    elif getattr(model.config, "is_encoder_decoder", False) or any(map(is_cross, attentions)):
        problem = "it has cross-attention to another sequence. Pass its encoder or decoder alone."
    elif any(hasattr(module, "sequence_exchange") for module in attentions):
        problem = "its sequences are sharded already. Call apply_document_attention first."
    elif any(
        hasattr(module, "sparse_attention") or isinstance(module, SparseSelfAttention)
        for module in model.modules()
    ):
        problem = "expected dense attention, got a sparse layout. Use one of the two."
    elif all(each.kind != inspect.Parameter.VAR_KEYWORD for each in forward.values()):
        problem = "expected a forward with further keyword arguments, got none. Use another model."
    elif "position_ids" not in forward:
        problem = "expected position_ids in forward, got none. Use a model that has them."
    elif getattr(model.forward, "__self__", None) is not model:
        problem = "expected a forward that is a method, got another one. Call this function before."
    return problem


def _pass_documents(model: Any, first_position: int) -> None:
    """Add the documents to the inputs of a model's forward, which adapters call past its hooks."""
    if _MARK in vars(model):  # and attention was another one in between
        return
    plain, parameters = model.forward.__func__, list(inspect.signature(model.forward).parameters)

    # A method, so that a copy of the model runs the copy's layers.
    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _add_documents(parameters, first_position, self, args, kwargs)
        return plain(self, *args, **kwargs)

    model.forward = MethodType(forward, model)
    setattr(model, _MARK, True)


def padding_position(model: torch.nn.Module) -> int | None:
    """Return the position of padding in a model that counts positions from it, as RoBERTa does."""
    for module in model.modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, torch.nn.Embedding) and positions.padding_idx is not None:
            return positions.padding_idx
    return None


def counts_attended(model: Any) -> bool:
    """Return whether a model counts positions from the `attention_mask`, as OPT does."""
    return bool(model.config.model_type == "opt")


def attended_positions(mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the attended tokens of a ``mask`` [batch, length], -1 for padding."""
    return mask.long().cumsum(1) * mask.long() - 1


def _add_documents(
    parameters: list[str],
    first_position: int,
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the documents to a model's inputs. Sharded sequences have another attention, and theirs already."""
    if model.config._attn_implementation != NAME:
        return args, kwargs
    inputs = dict(zip(parameters, args, strict=False)) | kwargs
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return args, kwargs
    cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
    documents, labels = inputs.get("cu_seq_lens_q"), inputs.get("labels")
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"past_key_values: expected no tokens, got {cache.get_seq_length()}: packed documents do not "
            "support generation. Call model.set_attn_implementation('sdpa') first."
        )
    positions = inputs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        _check_padding(model, inputs)
        if positions is None and counts_attended(model):
            inputs["position_ids"] = attended_positions(mask)
    if documents is None:
        documents = _documents(positions, mask, tokens.shape[:2])
    elif positions is None:
        counted = positions_in_documents(documents, *tokens.shape[:2]) + first_position
        inputs["position_ids"] = counted.to(tokens.device)
    inputs |= {"cu_seq_lens_q": documents, "attention_mask": None}
    if inputs.get("shift_labels") is not None:
        inputs["shift_labels"] = mask_last_labels(inputs["shift_labels"], documents, mask)
    elif labels is not None and model.can_generate():
        inputs["labels"] = mask_first_labels(labels, documents, mask)
    return (), inputs


def _check_padding(model: Any, inputs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for inputs that do not go with padding in the attention mask."""
    if inputs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q: expected no padding with them, got an attention_mask with some. Remove one "
            "of the two."
        )
    routed = inputs.get("output_router_logits")
    if getattr(model.config, "output_router_logits", False) if routed is None else routed:
        raise ValueError(
            "output_router_logits: expected False with padding, got True: the loss of the routers needs the "
            "attention_mask, which documents replace. Set it to False, or pass rows without padding."
        )


def _documents(positions: torch.Tensor | None, mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    if positions is None:
        positions = torch.arange(shape[1], dtype=torch.int64, device="cpu")[None]
        mask = None if mask is None else mask.to("cpu")
    if positions.ndim != 2:
        raise ValueError(
            f"position_ids: expected [batch, length], got {tuple(positions.shape)}. Pass one position per "
            "token."
        )
    return documents_from_positions(positions.expand(shape), mask)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers calls: [batch, heads, length, head dim] in, [batch, length, heads, head dim]
    out.
    """
    documents = checked_documents(module, attention_mask, kwargs)
    found = document_attention(
        query,
        key,
        value,
        documents,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).contiguous(), None


def checked_documents(
    module: torch.nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the documents among the arguments of attention; ``ValueError`` for what does not go with them.

    Args:
        module: asks for attention.
        mask: given to it.
        kwargs: the other arguments.
    """
    name, documents = type(module).__name__, kwargs.get("cu_seq_lens_q")
    for other in UNSUPPORTED:
        if kwargs.get(other) is not None:
            raise ValueError(
                f"{name}: attention within documents does not support {other}. Use a model without it."
            )
    if mask is not None:
        raise ValueError(
            f"{name}: expected no mask of tokens × tokens, got {tuple(mask.shape)}. Give documents by "
            "position_ids that begin anew."
        )
    if documents is None:
        raise ValueError(
            f"{name}: expected cu_seq_lens_q from the model's forward, got none. Call "
            "apply_document_attention(model) on the model that is called, and use one that passes keyword "
            "arguments on to its attention."
        )
    return documents


_MASKS = ("causal_mask_function", "bidirectional_mask_function", "packed_sequence_mask_function")
_COMBINATIONS = ("and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function")


def _mask(
    *_: Any, mask_function: Callable[..., Any] = causal_mask_function, **more: Any
) -> torch.Tensor | None:
    """Return no mask: documents say what is attended to. One that a model has nevertheless is refused."""
    if not _follows_documents(mask_function):
        raise ValueError(
            "attention mask: expected a causal or bidirectional one, got one that the model has changed (a "
            "window, or a prefix that is seen in full). Use inputs without it, or another attention."
        )
    mask: torch.Tensor | None = more.get("attention_mask")
    if mask is not None and mask.ndim == 2 and bool(mask.all()):
        return None  # BioGPT makes one that masks nothing where it gets none
    return mask


def _follows_documents(mask_function: Any) -> bool:
    """Return whether it is causal or bidirectional within documents, as functions of transformers' names."""
    name = getattr(mask_function, "__qualname__", "").partition(".")[0]
    if name not in _COMBINATIONS:
        return name in _MASKS
    contents = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    inner = [each for many in contents for each in (many if isinstance(many, tuple) else (many,))]
    return all(_follows_documents(each) for each in inner if callable(each))


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
