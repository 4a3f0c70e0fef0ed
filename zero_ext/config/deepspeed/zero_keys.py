"""DeepSpeed keys under zero_optimization."""

from __future__ import annotations

from .key import ANYTHING, FLAG, TEXTS, Fate, Key, ValueType, integer, or_null

_ROOT = "zero_optimization"


def _key(
    name: str,
    value_type: ValueType,
    fate: Fate,
    why: str,
    *,
    native: str = "",
    harmless: tuple[object, ...] = (),
    stages: tuple[int, ...] = (0, 1, 2, 3),
    alias: str = "",
) -> Key:
    aliases = (f"{_ROOT}.{alias}",) if alias else ()
    return Key(f"{_ROOT}.{name}", value_type, fate, why, native, harmless, True, "", stages, aliases)


_FULL_WEIGHTS = "full weights can always be had: zero_ext.full_state_dict(model)"
_UNITS_DECIDE = "a unit's size decides how much travels at a time, see reduce_bucket_size"

_SUPPORTED = (
    Key(f"{_ROOT}.stage", integer(0, 3), "supported", "ZeRO stage; 0 when missing, as in DeepSpeed", "stage"),
    _key(
        "reduce_bucket_size",
        integer(1),
        "supported",
        "elements of a unit in stages 0 to 2; 16,777,216 when missing",
        native="units.bucket_elements",
        stages=(0, 1, 2),
    ),
    _key(
        "stage3_prefetch_bucket_size",
        integer(0),
        "supported",
        "elements gathered ahead of their use",
        native="units.prefetch_elements",
        stages=(3,),
        alias="prefetch_bucket_size",
    ),
    _key(
        "stage3_max_reuse_distance",
        integer(0, 2**63 - 1),
        "supported",
        "a block's parameters stay gathered if no more elements are used before them again; 0 when missing",
        native="units.reuse_elements",
        stages=(3,),
        alias="max_reuse_distance",
    ),
    _key(
        "stage3_param_persistence_threshold",
        integer(0),
        "supported",
        "parameters with fewer elements stay gathered; 0 when missing",
        native="units.persistence_threshold",
        stages=(3,),
        alias="param_persistence_threshold",
    ),
    _key(
        "stage3_max_live_parameters",
        integer(1),
        "supported",
        "cap on gathered elements",
        native="units.max_live_elements",
        stages=(3,),
        alias="max_live_parameters",
    ),
    _key(
        "leaf_module.classes",
        TEXTS,
        "supported",
        "joins units.leaf_modules, by the class's own name without its package",
        stages=(3,),
    ),
    _key(
        "zero_quantized_weights",
        FLAG,
        "supported",
        "true is communication.quantized_weights = int8, in blocks of 256",
        harmless=(False,),
        stages=(3,),
    ),
    _key(
        "zero_quantized_gradients",
        FLAG,
        "supported",
        "true is communication.quantized_gradients = int4, in blocks of 256",
        harmless=(False,),
        stages=(2, 3),
    ),
    _key(
        "zero_hpz_partition_size",
        integer(0),
        "supported",
        "above 1: communication.hierarchical_partition, and as many communication.ranks_per_node",
        harmless=(1, 0),
        stages=(3,),
    ),
    _key(
        "mics_shard_size",
        integer(-1),
        "supported",
        "above 0: communication.shard_group_size",
        harmless=(-1,),
        stages=(3,),
    ),
    _key("leaf_module.names", TEXTS, "supported", "joins units.leaf_modules", stages=(3,)),
    _key(
        "leaf_module.name_suffixes",
        TEXTS,
        "unsupported",
        "Name the modules in full under leaf_module.names",
        harmless=([], ""),
    ),
)

# Name without its optional "stage3_", the value that asks for what happens here anyway, the reason.
_FLAGS_WITHOUT_EFFECT = (
    ("contiguous_gradients", True, "a unit's gradients always are in one buffer"),
    ("reduce_scatter", True, "the stage decides which collective runs"),
    ("use_multi_rank_bucket_allreduce", True, "no bucket belongs to one rank"),
    ("allgather_partitions", True, "parameters always come by all-gather"),
    ("compute_grad_norm", True, "the norm comes with the overflow check"),
    ("load_from_fp32_weights", True, "master weights always load from fp32"),
    ("elastic_checkpoint", False, "every checkpoint loads at any world size"),
    ("ignore_unused_parameters", True, "unused parameters are always allowed"),
    ("legacy_stage1", False, "there is one engine for all stages"),
    ("round_robin_gradients", False, "every rank owns a part of every unit"),
    ("parameter_alignment", False, "the layout of a unit is fixed"),
    ("memory_efficient_linear", False, "linear layers stay torch's own"),
    ("pipeline_loading_checkpoint", False, "loading streams in any case"),
    ("override_module_apply", False, "Module.apply stays torch's own"),
    ("log_trace_cache_warnings", False, "another order of modules costs time and is no event here"),
    ("enable_sanity_checks", True, "checks of a unit's state always run"),
    ("save_muon_momentum_buffer_in_memory", False, "Muon is refused"),
    ("stage3_gather_fp16_weights_on_model_save", False, _FULL_WEIGHTS),
    ("stage3_gather_16bit_weights_on_model_save", False, _FULL_WEIGHTS),
    ("stage3_use_all_reduce_for_fetch_params", False, "parameters always come by all-gather"),
    ("mics_hierarchical_params_gather", False, "each parameter crosses to a node once in codes"),
    ("stage3_allgather_sequential", False, "a unit is gathered straight into its buffer"),
)
_SIZES_WITHOUT_EFFECT = (
    ("allgather_bucket_size", (), _UNITS_DECIDE),
    ("sub_group_size", (), "the step is one pass over a shard"),
    ("stage3_model_persistence_threshold", (2**63 - 1,), "the sum of small parameters has no cap"),
    ("stage3_module_granularity_threshold", (0,), "units are blocks, see units.block_classes"),
)


def _alias(name: str) -> str:
    """DeepSpeed takes most stage3_ keys without that prefix too."""
    return name.removeprefix("stage3_") if name.startswith("stage3_") and "fp16" not in name else ""


_WITHOUT_EFFECT = (
    *(
        _key(name, FLAG, "no effect", why, harmless=(calm,), alias=_alias(name))
        for name, calm, why in _FLAGS_WITHOUT_EFFECT
    ),
    *(
        _key(name, integer(0, 2**63 - 1), "no effect", why, harmless=calm, alias=_alias(name))
        for name, calm, why in _SIZES_WITHOUT_EFFECT
    ),
    _key("overlap_comm", or_null(FLAG), "no effect", "communication always overlaps", harmless=(True, None)),
)

_UNSUPPORTED = (
    _key(
        "zero_quantized_nontrainable_weights",
        FLAG,
        "unsupported",
        "Frozen weights keep their precision. Quantize the model itself, or set zero_quantized_weights to "
        "gather them in int8",
        harmless=(False,),
    ),
    _key(
        "zeropp_loco_param",
        ANYTHING,
        "unsupported",
        "Quantized gradients have no error feedback here. Remove it",
        harmless=(None,),
    ),
    _key(
        "zenflow",
        ANYTHING,
        "unsupported",
        "Split optimizer steps do not exist here. Remove it",
        harmless=(None, {}),
    ),
)

ZERO_KEYS = _SUPPORTED + _WITHOUT_EFFECT + _UNSUPPORTED
