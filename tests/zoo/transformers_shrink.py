"""Shrink the default configurations of transformers to a size that trains in a fraction of a second.

Every field of a configuration, sub-configurations included, is shrunk by its name. Two modes exist:

* constant: all widths become ``WIDTH``, all feed-forward sizes ``FEED_FORWARD``, all head sizes ``HEAD_DIM``.
  Fields that must be equal stay equal. This mode is the default.
* scaled: all widths are divided by ``SCALE``, so that ratios and products hold. Used where a configuration
  has a list of different widths, one per stage of a hierarchical model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

WIDTH = 64
FEED_FORWARD = 128
HEADS = 4
HEAD_DIM = 16
LAYERS = 2
VOCABULARY = 128
POSITIONS = 64
EXPERTS = 4
SCALE = 8
# As an override: the class's own default.
DEFAULT = object()

# The first pattern found in a field's name decides what the field is.
PATTERNS = (
    ("window", r"window_size"),
    ("groups", r"(^|_)n_groups?$|num_expert_groups?$"),
    ("topk_group", r"topk_group"),
    ("width", r"upsample_groups"),
    ("keep", r"kernel|stride|dilation|padding|ratio|_factor|scale|window_layers|loss|cost|_rate|downsample$"),
    (
        "keep",
        r"num_channels|in_chans|input_channels|audio_channels|num_labels|chunk_size_feed|mask_(time|feat)",
    ),
    ("keep", r"type_vocab|temperature|num_buckets|_buckets|position_id|max_distance|spatial_merge"),
    ("token", r"(token|bos|eos|pad|sep|cls|start|end|mask)(_token)?_(id|index)$|_token_ids?$"),
    ("keep", r"_id$|_idx$|_ids$|_index$|_token$|sampling_rate|interval|_period|_offset"),
    ("keep", r"upsample_rates|_ratios|num_feature_levels|_points|groups|sparse_step"),
    (
        "vocabulary",
        r"vocab_size|vocabulary_size|codebook_size|num_qa_labels|num_object_labels|num_attr_labels",
    ),
    ("experts_per_token", r"num_experts_per_tok|moe_k$|moe_topk|top_k_experts|experts_per_token|moe_top_k"),
    ("experts", r"num_experts|num_local_experts|n_routed_experts|num_routed_experts|zero_expert_num"),
    ("dense_layers", r"first_k_dense_replace|num_kv_shared_layers|num_dense_layers"),
    ("head_dim", r"head_dim|d_kv$|kv_channels|head_size|head_width|key_dim$|rotary_dim|d_head$"),
    ("kv_heads", r"kv_heads|key_value_heads|key_value_attention_heads|n_kv_head|n_head_kv"),
    ("heads", r"heads?$|num_heads|n_head|heads_per"),
    ("layers", r"(layers?|depths?|num_blocks|n_blocks|num_hidden_groups)$|^num_layers|_per_block$"),
    ("layers", r"_layers_|n_layers?|num_block|layer_num|blocks_per_stage|per_stack$"),
    ("positions", r"max_position|n_positions|n_ctx|max_seq|max_source|max_target|context_length$|max_length"),
    ("positions", r"local_attention|sliding_window|max_2d_position|index_topk|attention_window|block_size"),
    ("feed_forward", r"intermediate|ffn|mlp_dim|d_ff$|feed_?forward|mlp_hidden|d_inner|inner_dim"),
    ("image_size", r"image_size|img_size|input_size|input_resolution|image_height|image_width"),
    ("patch_size", r"patch_size"),
    ("squares", r"num_position_embeddings|num_patches|image_seq_len"),
    ("queries", r"num_queries|num_query|query_length|query_num|num_latents|num_denoising"),
    ("mel", r"num_mel_bins|n_mels|^feature_size|input_feat"),
    ("filters", r"num_filters"),
    ("rank", r"lora_rank|_rank$"),
    (
        "width",
        r"hidden|d_model|n_embd|dims?$|dim_|embed|embd|size|channel|width|features|filters|units|planes",
    ),
)
KINDS = [(kind, re.compile(pattern)) for kind, pattern in PATTERNS]
LAYER_INDICES = re.compile(r"indices|indexes|layer_ids?$|layers_block|layers?_idx|(?<!numb_of)_layers$")
DROPOUT = re.compile(r"dropout|pdrop$|drop_rate$")
NO_DROPOUT = re.compile(r"layerdrop|path")


@dataclasses.dataclass
class Context:
    """What a field's new value depends on besides its name.

    Attributes:
        scaled: the mode, for the whole tree of configurations.
        layers: the new number of layers of this configuration.
        old_layers: the number of layers before.
        tokens: new ids of special tokens, by their old id, for the whole tree.
    """

    scaled: bool
    layers: int = LAYERS
    old_layers: int = 0
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)


def kind_of(name: str) -> str | None:
    """Return what a field is, judging by its name, or None for a field that stays as it is."""
    for kind, pattern in KINDS:
        if pattern.search(name):
            return kind
    return None


def values_of(config: Any) -> dict[str, Any]:
    """Return the public fields of a configuration without the names that transformers adds to every one."""
    skipped = {"id2label", "label2id", "num_labels", "chunk_size_feed_forward", "problem_type"}
    names = [field.name for field in dataclasses.fields(config) if field.init]
    stored = vars(config)
    # Some fields are stored under another name.
    attributes = {name: config.attribute_map.get(name, name) for name in names}
    return {
        name: stored[attribute]
        for name, attribute in attributes.items()
        if attribute in stored and name not in skipped and name[0] != "_"
    }


def is_config(value: Any) -> bool:
    """Tell whether a field's value is a sub-configuration."""
    return hasattr(value, "to_dict") and dataclasses.is_dataclass(value)


def walk(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all fields of a configuration and its sub-configurations."""
    for name, value in values_of(config).items():
        if is_config(value):
            yield from walk(value)
        else:
            yield name, value


def is_int(value: Any) -> bool:
    """Tell whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def has_stages(config: Any) -> bool:
    """Tell whether some field lists widths, heads or depths, as hierarchical vision models have them."""
    for name, value in walk(config):
        if (
            not isinstance(value, list | tuple)
            or len(value) < 2
            or "tdnn" in name
            or not all(map(is_int, value))
        ):
            continue
        kind = kind_of(name)
        if kind == "width" and len(set(value)) > 1 and max(value) >= 64:
            return True
        if kind == "heads" or name == "depths":
            return True
    return False


def special_tokens(config: Any) -> dict[int, int]:
    """Return small ids for the special tokens of a tree of configurations, equal ones for equal ones."""
    ids: set[int] = set()
    for name, value in walk(config):
        if kind_of(name) == "token":
            ids.update(filter(is_int, value if isinstance(value, list | tuple) else [value]))
    special = {value for value in ids if value < 4}
    free = iter(range(VOCABULARY - 1, 3, -1))
    return {value: value if value in special else next(free) for value in sorted(ids)}


def divided(value: int) -> int:
    """Return a width in scaled mode."""
    return value // SCALE if value >= 4 * SCALE and value % SCALE == 0 else value


def per_head(value: int, context: Context) -> int:
    """Return the size of an attention head."""
    return max(2, divided(value)) if context.scaled else min(value, HEAD_DIM)


def heads(value: int, context: Context) -> int:
    """Return a number of heads that divides the width."""
    if context.scaled or value < 3:
        return value
    return 2 if value == 3 else HEADS


def kv_heads(value: int, fields: dict[str, Any], context: Context) -> int:
    """Return a number of heads for keys and values, equal to that of the queries where it was."""
    if context.scaled or value == 1:
        return value
    queries = [item for name, item in fields.items() if kind_of(name) == "heads" and is_int(item)]
    return heads(value, context) if value in queries else 2


def scalar(kind: str, value: int, context: Context) -> int:
    """Return the new value of an integer field of the given kind."""
    limits = {
        "vocabulary": VOCABULARY,
        "positions": POSITIONS,
        "experts": EXPERTS,
        "experts_per_token": 2,
        "dense_layers": 1,
        "queries": 8,
        # Vision models count windows in pixels or in patches.
        "window": 32 if value > 32 else 2,
        "groups": 2,
        "topk_group": 1,
        "squares": 16,
        "mel": 16,
        "filters": 8,
        "rank": HEAD_DIM,
        "layers": context.layers,
    }
    if kind in limits:
        return min(value, limits[kind])
    if kind == "token":
        return context.tokens.get(value, value)
    if kind == "head_dim":
        return per_head(value, context)
    if kind == "heads":
        return heads(value, context)
    if kind == "image_size":
        return min(value, 64 if context.scaled else 32)
    if kind == "patch_size":
        return value if value <= 8 else 8
    limit = FEED_FORWARD if kind == "feed_forward" else WIDTH
    return divided(value) if context.scaled else min(value, limit)


def layer_indices(value: list[int], context: Context) -> list[int]:
    """Return indices of layers that exist after shrinking, one for each old one where there are enough."""
    if len(set(value)) == len(value) <= context.layers and min(value) >= 0:
        return list(range(context.layers - len(value), context.layers))
    found = sorted({index if index < 0 else min(index, context.layers - 1) for index in value})
    return [max(index, -context.layers) for index in found]


def sequence(name: str, value: list[Any], context: Context) -> list[Any]:
    """Return the new value of a field that is a list."""
    kind = kind_of(name)
    if value and all(isinstance(item, str) for item in value) and len(value) == context.old_layers > LAYERS:
        distinct = list(dict.fromkeys(value))
        return [distinct[min(index, len(distinct) - 1)] for index in range(context.layers)]
    if not all(map(is_int, value)) or not value:
        return value
    if len(value) == context.old_layers and context.old_layers > LAYERS and not context.scaled:
        return [scalar(kind, item, context) if kind else item for item in value[: context.layers]]
    if LAYER_INDICES.search(name):
        return layer_indices(value, context)
    if kind is None or kind == "keep":
        return value
    return [scalar(kind, item, context) for item in value]


def count_layers(config: Any) -> tuple[int, int]:
    """Return the number of layers of a configuration, old and new.

    Every type in a list of layer types gets a layer, and so does every feature map of a backbone.
    """
    values = values_of(config)
    old = next(
        (
            values[name]
            for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "depth", "n_layers")
            if is_int(values.get(name))
        ),
        0,
    )
    new = LAYERS
    for value in values.values():
        if (
            isinstance(value, list | tuple)
            and len(value) == old
            and all(isinstance(item, str) for item in value)
        ):
            new = max(new, len(set(value)))
    for name, value in vars(config).items():
        if old and name.endswith("indices") and isinstance(value, list | tuple):
            new = max(new, len(value))
    return old, new


def rope(config: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters whose sections add up to half of the rotated part of a head's new size."""
    if not value or any(isinstance(item, dict) for item in value.values()):
        return {name: rope(config, item) if isinstance(item, dict) else item for name, item in value.items()}
    if "mrope_section" not in {*value, *(getattr(config, "ignore_keys_at_rope_validation", None) or ())}:
        return value
    rotated = int(HEAD_DIM * value.get("partial_rotary_factor", 1.0)) // 2
    return {**value, "mrope_section": [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]}


def out_indices(config: Any, layers: int) -> dict[str, list[int]]:
    """Return which feature maps a backbone returns: as many as before, or the first ones of fewer layers."""
    indices = vars(config).get("_out_indices")
    if not indices:
        return {}
    return {"out_indices": list(range(1, len(indices) + 1)) if layers else list(indices)}


def shrunk_fields(config: Any, context: Context, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields to pass to a configuration's class, those whose value changes."""
    old, new = count_layers(config)
    context = dataclasses.replace(context, layers=new, old_layers=old)
    fields = values_of(config)
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        kind = kind_of(name)
        if is_config(value):
            inner = {
                key.partition(".")[2]: item for key, item in overrides.items() if key.startswith(name + ".")
            }
            changed[name] = overrides[name] if name in overrides else sub_config(value, context, inner)
        elif isinstance(value, float) and DROPOUT.search(name) and not NO_DROPOUT.search(name):
            changed[name] = 0.0
        elif is_int(value) and kind not in (None, "keep", "kv_heads"):
            changed[name] = scalar(kind, value, context)
        elif kind == "kv_heads" and is_int(value):
            changed[name] = kv_heads(value, fields, context)
        elif name == "head_dim" and value is None and not context.scaled:
            changed[name] = HEAD_DIM
        elif isinstance(value, list | tuple):
            changed[name] = sequence(name, list(value), context)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            changed[name] = rope(config, value)
    changed |= out_indices(config, old)
    changed = {
        name: value for name, value in changed.items() if is_config(value) or value != fields.get(name)
    }
    changed |= {name: value for name, value in overrides.items() if "." not in name}
    return {name: value for name, value in changed.items() if value is not DEFAULT}


def sub_config(config: Any, context: Context, overrides: dict[str, Any]) -> Any:
    """Return a shrunk sub-configuration, keeping what its parent changed of the defaults."""
    fields = shrunk_fields(config, context, overrides)
    try:
        defaults = vars(type(config)())
    except Exception:
        defaults = {}
    for name, value in values_of(config).items():
        if name not in fields and not is_config(value) and value != defaults.get(name):
            fields[name] = value
    return type(config)(**fields)


def shrink(config: Any, overrides: dict[str, Any]) -> Any:
    """Return a small configuration of the same class.

    Args:
        config: an instance with default values.
        overrides: values by field name, with dots for sub-configurations. The name "scaled" sets the mode.
    """
    overrides = dict(overrides)
    context = Context(scaled=overrides.pop("scaled", has_stages(config)), tokens=special_tokens(config))
    return type(config)(**shrunk_fields(config, context, overrides))
