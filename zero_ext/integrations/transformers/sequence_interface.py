"""Sequences over ranks in Hugging Face models, through transformers' registry of attention."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zero_ext.attention.packed_documents import bounds_tensor, is_discontinuous, row_groups
from zero_ext.integrations.transformers.attention_interface import (
    check_full_attention,
    is_cross,
    registry_attentions,
)
from zero_ext.integrations.transformers.document_interface import NAME as DOCUMENTS
from zero_ext.integrations.transformers.document_interface import (
    attended_positions,
    checked_documents,
    counts_attended,
    padding_position,
)
from zero_ext.parallel.ring import RingAttention, chunk_count, shard_positions
from zero_ext.parallel.ulysses import SequenceExchange, sequence_rank

_LAYERS = {"full_attention", "sliding_attention"}
_OF_HEADS = ("position_bias", "s_aux", "head_mask")  # given to attention for all heads


def check_sequences(model: PreTrainedModel, mesh: DeviceMesh, ring: int) -> None:
    """Raise ``ValueError`` unless a model's attention may see sequences that lie over ranks; see
    :func:`zero_ext.integrations.apply_sequence_parallel`."""
    config: Any = model.config
    attentions = registry_attentions(model)
    attention = config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    sub_configs = [name for name in config.sub_configs if getattr(config, name, None) is not None]
    problem: str | None = None
    if not attentions or not model._can_set_attn_implementation():
        problem = (
            "expected attention from transformers' registry, got its own. Use "
            "zero_ext.parallel.sequence_attention in it."
        )
    elif any(hasattr(module, "sequence_exchange") for module in attentions):
        problem = "its sequences are sharded already. Call apply_sequence_parallel once."
    elif getattr(config, "is_encoder_decoder", False) or any(map(is_cross, attentions)):
        problem = "it has cross-attention to another sequence. Pass its encoder or decoder alone."
    elif sub_configs:
        problem = f"it has several configurations ({', '.join(sub_configs)}). Pass its language model alone."
    elif kinds - _LAYERS:
        problem = f"layers: expected {sorted(_LAYERS)}, got {min(kinds - _LAYERS)!r}. Use a model with those."
    elif (
        not (model.can_generate() or model.base_model is model or predicts_masked(model))
        or getattr(model, "pooler", None) is not None
        or hasattr(model, "multiple_choice_head")
    ):
        problem = "its head may look at several tokens. Pass its base model, without a pooler."
    elif getattr(config, "output_router_logits", False):
        problem = "output_router_logits: its loss needs the tokens of all ranks. Set it to False."
    elif kind := _by_length(config):
        problem = f"its rotary embeddings of type {kind!r} depend on the full length. Use another type."
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        problem = "expected position_ids in forward, got none. Use a model that takes them."
    elif attention not in ALL_MASK_ATTENTION_FUNCTIONS or attention not in ALL_ATTENTION_FUNCTIONS:
        problem = (
            f"attention: expected one of transformers' registries, got {attention!r}. Call "
            "model.set_attn_implementation('sdpa') first."
        )
    elif ring > 1 and attention not in ("sdpa", DOCUMENTS):
        problem = f"attention: expected 'sdpa' or {DOCUMENTS!r} with a ring, got {attention!r}. Pass ring=1."
    ranks = sequence_rank(mesh)[1] // ring
    tensors = mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
    heads = getattr(config, "num_attention_heads", None)
    if not problem and isinstance(heads, int) and heads % (ranks * tensors):
        name = "cp" if ring == 1 else "cp / ring"
        problem = (
            f"expected heads divisible by {name} {ranks} × tp {tensors}, got {heads}. Choose divisors of "
            f"{heads}."
        )
    if problem:
        raise ValueError(f"{type(model).__name__}: {problem}")
    if ring > 1:
        check_full_attention(model)


def _by_length(config: Any) -> str:
    """Return the type of rotary embeddings that a part of a sequence would turn otherwise than the whole."""
    inputs = getattr(config, "rope_parameters", None) or {}
    every = [inputs, *(each for each in inputs.values() if isinstance(each, dict))]
    kinds = {str(each.get("rope_type") or each.get("type")) for each in every}
    return min(kinds & {"dynamic", "longrope"}, default="")


def predicts_masked(model: Any) -> bool:
    """Return whether a model predicts masked tokens, each by its own hidden state."""
    return bool(model.loss_type == "ForMaskedLM")


def exchange_sequences(model: PreTrainedModel, exchange: SequenceExchange) -> None:
    """Put ``exchange`` around the attention of a model. No other model may hold its configuration."""
    inner = model.config._attn_implementation
    name = f"zero_ext_sequence_{exchange.size}_{exchange.ring}_{inner}"
    attend = functools.partial(_attend, inner) if exchange.ring == 1 else _attend_in_rings
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    # Ranks in a ring get documents in place of masks.
    masks = inner if exchange.ring == 1 else DOCUMENTS
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, functools.partial(_mask, masks, exchange.size))
    model.set_attn_implementation(name)
    attentions: list[Any] = registry_attentions(model)
    for module in attentions:
        module.sequence_exchange = exchange
    masked = predicts_masked(model)
    documents = exchange.ring > 1 or inner == DOCUMENTS
    check = _ShardCheck(exchange, masked, padding_position(model), counts_attended(model), documents)
    # A caller may use the base model alone, and adapters call the forward of the outer model past its hooks.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(check.before, with_kwargs=True)
            module.register_forward_hook(check.after, always_call=True)
    if masked:
        _sum_masked_losses(model, list(inspect.signature(model.forward).parameters))


def refuse_documents(model: PreTrainedModel) -> None:
    """Make a model on one rank refuse documents that its attention does not keep apart, as on several ranks.

    transformers itself looks at positions that begin anew, but not if there is a cache.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(_refuse_documents, with_kwargs=True)


def _refuse_documents(model: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    attention = model.config._attn_implementation
    if kwargs.get("cu_seq_lens_q") is not None and attention != DOCUMENTS and "flash" not in attention:
        raise ValueError(". ".join(_full_rows_problem()))


def _sum_masked_losses(model: Any, parameters: list[str]) -> None:
    """Make a model that predicts masked tokens divide its summed losses by ``num_items_in_batch``.

    BERT and its kin ignore that number and return the mean over a rank's own tokens.
    """
    forward = model.forward

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        inputs = dict(zip(parameters, args, strict=False)) | kwargs
        labels, items = inputs.pop("labels", None), inputs.pop("num_items_in_batch", None)
        output = forward(**inputs)
        if labels is None:
            return output
        logits = output[0] if isinstance(output, tuple) else output.logits
        total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
        loss = total / items
        return (loss, *output) if isinstance(output, tuple) else type(output)(loss=loss, **output)

    model.forward = with_loss


class _ShardCheck:
    """Compares the shards of all ranks before the forward of a model, and of no model in it once more.

    Args:
        exchange: of the model's attention.
        masked: whether it has labels of tokens where they are.
        padding: position of padding from which it counts, if it does.
        counted: whether it counts positions from the mask.
        documents: whether its attention is within documents.
    """

    def __init__(
        self, exchange: SequenceExchange, masked: bool, padding: int | None, counted: bool, documents: bool
    ) -> None:
        self._exchange, self._masked, self._counted = exchange, masked, counted
        self._padding, self._documents = padding, documents
        self._running: list[torch.nn.Module] = []

    def before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raise ``ValueError`` on all ranks unless all give shards of one batch."""
        self._running.append(module)
        if len(self._running) > 1:
            return None
        parameters = inspect.signature(module.forward).parameters
        inputs = dict(zip(parameters, args, strict=False)) | kwargs
        self._agree({name: value for name, value in inputs.items() if value is not None})
        return args, {name: value for name, value in kwargs.items() if name != "sequence_ring"}

    def after(self, module: torch.nn.Module, *_: Any) -> None:
        """Note the end of a forward, also of one that raised an error."""
        if module in self._running:
            self._running.remove(module)

    def _agree(self, inputs: dict[str, Any]) -> None:
        exchange = self._exchange
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if tokens is None:
            problem = "inputs: expected input_ids or inputs_embeds, got neither. Pass one of them."
            exchange.agree((0, 0, 0, 0), "batch and length", problem)
            return
        shape, documents = tokens.shape[:2], self._documents
        problem, fix = _problem(exchange, inputs, shape, self._masked, self._padding)
        shards: _DocumentShard | None = None
        if not problem and (documents or "cu_seq_lens_q" in inputs):
            problem, fix = _full_rows_problem()
            if documents:
                shards, problem, fix = _document_shard(exchange, inputs, shape)
        elif not problem and self._padding is None and _has_packed_rows(inputs, exchange, shape):
            problem = "position_ids: they begin anew (packed sequences), which needs an attention_mask of 4 "
            problem += "dimensions"
            fix = "Pass one, or call apply_document_attention(model) before apply_sequence_parallel."
        if not problem and self._counted and _is_miscounted(inputs, exchange, shape):
            problem = "position_ids: they count padding, and this model does not"
            fix = "Give shard_batch position_ids, attention_mask.cumsum(1) * attention_mask - 1."
        bounds = [] if shards is None else shards.bounds.tolist()
        declared = 0 if shards is None else shards.ring
        numbers = (*shape, zlib.crc32(repr(bounds).encode()), declared)
        what = "batch, length, a hash of the documents, and the ring of the shards"
        exchange.agree(numbers, what, f"{problem}. {fix}" if problem else "")
        if shards is not None and not declared:
            _compare_cuts(exchange, shards)


def _is_miscounted(inputs: dict[str, Any], exchange: SequenceExchange, shape: torch.Size) -> bool:
    """Return whether positions are others than those of the tokens that the mask has up to there."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None or mask.ndim != 2 or positions is None:
        return False
    own = slice(exchange.rank * shape[1], (exchange.rank + 1) * shape[1])
    expected, attended = attended_positions(mask)[:, own], mask.bool()[:, own]
    return bool(((positions.expand(shape) != expected) & attended).any())


def _has_packed_rows(inputs: dict[str, Any], exchange: SequenceExchange, shape: torch.Size) -> bool:
    """Return whether positions begin anew, and no mask [batch, 1, length, length] keeps documents apart."""
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        return False
    if mask is not None:  # of the full sequences, which are cut into consecutive shards without a ring
        mask = mask[:, exchange.rank * shape[1] :][:, : shape[1]]
    return is_discontinuous(inputs["position_ids"].expand(shape), mask)


def _full_rows_problem() -> tuple[str, str]:
    return (
        "cu_seq_lens_q: expected none, as attention of this model is over full rows, got some",
        "Call apply_document_attention(model) before apply_sequence_parallel.",
    )


def _problem(
    exchange: SequenceExchange,
    inputs: dict[str, Any],
    shape: torch.Size,
    masked: bool,
    padding: int | None,
) -> tuple[str, str]:
    """Return the problem of a rank's inputs, other than of documents, and its fix.

    The problem is empty if there is none.
    """
    length = exchange.size * shape[1]
    positions, mask, cache = (
        inputs.get(name) for name in ("position_ids", "attention_mask", "past_key_values")
    )
    seen = () if mask is None else tuple(mask.shape)
    problem, fix = "", "Make the inputs from a whole batch with zero_ext.parallel.shard_batch."
    if positions is None:
        problem = (
            "position_ids: expected those of this shard, got none, so every shard would be the first one"
        )
    elif tuple(positions.shape) not in ((1, shape[1]), tuple(shape)):
        problem = f"position_ids: expected shape {tuple(shape)}, got {tuple(positions.shape)}"
    elif padding is not None and int(positions.min()) < padding:
        problem = f"position_ids: expected at least {padding}, got {int(positions.min())}"
        fix = f"Give shard_batch padding_idx={padding}, from which this model counts."
    elif masked and "shift_labels" in inputs:
        problem = "labels: expected those of the tokens themselves, got shift_labels"
        fix = "Give shard_batch shift_labels=False."
    elif "labels" in inputs and not masked and "shift_labels" not in inputs:
        problem = (
            "labels: expected shift_labels with them, got none, and a shard lacks the next one's first label"
        )
    elif "labels" in inputs and "num_items_in_batch" not in inputs:
        problem = (
            "labels: expected num_items_in_batch with them, got none, and a shard's mean is another loss"
        )
    elif seen and seen[-1] != length:
        problem = f"attention_mask: expected all {length} tokens of the sequence, got {seen}"
    elif len(seen) == 4 and seen[1:3] != (1, length):
        problem = f"attention_mask: expected [batch, 1, {length}, {length}], got {seen}"
    elif cache is not None and cache.get_seq_length():
        problem = (
            f"past_key_values: expected no tokens, got {cache.get_seq_length()}, and sharded sequences do "
        )
        problem += "not support generation"
        fix = "Generate with the model before its sequences are sharded."
    return problem, fix


class _DocumentShard(NamedTuple):
    """Documents of the full batch, and a rank's tokens in them.

    Attributes:
        bounds: int64 [documents + 1] in host memory.
        tokens: positions of this rank's tokens in the full sequences.
        document: number of each of them, [batch, tokens].
        offset: position that the first token of its document would have, [batch, tokens].
        ring: that `shard_batch` cut for; 0 if not known.
    """

    bounds: torch.Tensor
    tokens: torch.Tensor
    document: torch.Tensor
    offset: torch.Tensor
    ring: int


def _document_shard(
    exchange: SequenceExchange, inputs: dict[str, Any], shape: torch.Size
) -> tuple[_DocumentShard | None, str, str]:
    """Return this rank's shard of documents, or their problem and its fix.

    Positions that do not increase with the tokens of a document are one. The problem is empty if there is
    none.
    """
    batch, length = shape[0], shape[1] * exchange.size
    listed, positions, mask, ring = (
        inputs.get(name) for name in ("cu_seq_lens_q", "position_ids", "attention_mask", "sequence_ring")
    )
    fix = f"Give shard_batch ring={exchange.ring}, and packed=True for packed rows."
    if mask is not None:
        seen = tuple(mask.shape)
        return None, f"attention_mask: expected none, as documents say what is padding, got {seen}", fix
    if listed is None or positions is None:
        return None, "cu_seq_lens_q: expected the documents of the full batch, got none", fix
    if ring is not None and int(ring) != exchange.ring:
        return None, f"sequence_ring: expected shards for a ring of {exchange.ring}, got {int(ring)}", fix
    try:
        row_groups(listed, batch, length)
        tokens = shard_positions(length, exchange.rank, exchange.size, exchange.ring)
        bounds = bounds_tensor(listed).to("cpu", torch.int64)
    except (TypeError, ValueError) as error:
        return None, str(error).rstrip("."), fix
    rows = torch.arange(batch, device="cpu")[:, None] * length
    document = torch.bucketize(rows + tokens, bounds, right=True) - 1
    offset = positions.to("cpu").expand(batch, -1) - (rows + tokens - bounds[document])
    if bool(((document.diff() == 0) & (offset.diff() != 0)).any()):
        return (
            None,
            "position_ids: expected ones that increase by 1 per token within a document, got others",
            fix,
        )
    return _DocumentShard(bounds, tokens, document, offset, 0 if ring is None else int(ring)), "", fix


def _compare_cuts(exchange: SequenceExchange, shard: _DocumentShard) -> None:
    """Raise ``ValueError`` on all ranks unless documents go on from one rank to the next; a collective.

    Shards for another ring have such positions on each rank alone.
    """
    batch, length = shard.offset.shape[0], shard.offset.shape[1] * exchange.size
    unit = length // math.lcm(exchange.size, chunk_count(exchange.ring))
    cuts = torch.arange(unit, length, unit, device="cpu")
    offsets = torch.zeros(batch, length, dtype=torch.int64, device="cpu")
    offsets[:, shard.tokens] = shard.offset
    before, after = exchange.total(torch.stack((offsets[:, cuts - 1], offsets[:, cuts])))
    rows = torch.arange(batch, device="cpu")[:, None] * length
    within = ~torch.isin(rows + cuts, shard.bounds)
    if bool((within & (before != after)).any()):
        raise ValueError(
            "position_ids: expected ones that go on within a document from rank to rank, got others, as of "
            f"shards for another ring. Give shard_batch ring={exchange.ring}."
        )


class _Regrouped:
    """An attention module with other groups of query heads: some of its heads, keys repeated."""

    def __init__(self, module: torch.nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend(
    inner: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers calls: [batch, heads, length / cp, head dim] in, [batch, length / cp, heads,
    head dim] out.
    """
    exchange = _exchange_of(module)
    for name in _OF_HEADS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: {name} covers heads of other ranks, so it is not supported. Use a "
                "model without it."
            )
    kwargs.pop("position_ids", None)  # of a part, where flash attention looks for packed sequences
    full = exchange.enter(query, key, value)
    groups = full[0].shape[1] // full[1].shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:
        module = _Regrouped(module, groups)
    with exchange.abort_on_error():
        found, _ = ALL_ATTENTION_FUNCTIONS[inner](module, *full, attention_mask, **kwargs)
    return exchange.leave(found.transpose(1, 2)).transpose(1, 2).contiguous(), None


def _attend_in_rings(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return what transformers calls, as :func:`_attend`."""
    exchange = _exchange_of(module)
    documents = checked_documents(module, attention_mask, kwargs)
    if dropout:
        raise ValueError(
            f"{type(module).__name__}: expected no dropout of attention in a ring, got {dropout}. Set it to "
            "0 in the model's configuration."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    found = RingAttention(exchange).attend(query, key, value, documents, is_causal=causal, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


def _exchange_of(module: Any) -> SequenceExchange:
    exchange: SequenceExchange | None = getattr(module, "sequence_exchange", None)
    if exchange is None:
        raise RuntimeError(
            f"{type(module).__name__}: its attention exchanges sequences between ranks, but it has no mesh. "
            "Call apply_sequence_parallel(model, mesh)."
        )
    return exchange


def _mask(
    inner: str,
    ranks: int,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    **more: Any,
) -> Any:
    """Return the mask of the full sequence. The ``attention_mask`` of the caller is one, too."""
    length = ranks * q_length
    mask = more.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.shape[1] != length:
        if not bool(mask.all()):
            raise ValueError(
                f"attention_mask: expected one of all {length} tokens, got one that the model has made of "
                f"{mask.shape[1]}. Pass attention_mask to the model."
            )
        more["attention_mask"] = None  # BioGPT makes one that masks nothing where it gets none
    return ALL_MASK_ATTENTION_FUNCTIONS[inner](
        batch_size=batch_size, q_length=length, kv_length=length, q_offset=0, kv_offset=0, **more
    )
