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


_FULL_WEIGHTS = "full weights are always available from zero_ext.full_state_dict(model)"
_UNITS_DECIDE = "each gather has the size of a unit, which reduce_bucket_size limits in stages 0 to 2"

_SUPPORTED = (
    Key(
        f"{_ROOT}.stage", integer(0, 3), "supported", "ZeRO stage. The default is 0, as in DeepSpeed", "stage"
    ),
    _key(
        "reduce_bucket_size",
        integer(1),
        "supported",
        "largest size of a unit in stages 0 to 2, in elements. The default is 16,777,216",
        native="units.bucket_elements",
        stages=(0, 1, 2),
    ),
    _key(
        "stage3_prefetch_bucket_size",
        integer(0),
        "supported",
        "number of elements to gather ahead of their use",
        native="units.prefetch_elements",
        stages=(3,),
        alias="prefetch_bucket_size",
    ),
    _key(
        "stage3_max_reuse_distance",
        integer(0, 2**63 - 1),
        "supported",
        "largest number of elements used between two uses of a block for which its parameters stay "
        "gathered. The default is 0",
        native="units.reuse_elements",
        stages=(3,),
        alias="max_reuse_distance",
    ),
    _key(
        "stage3_param_persistence_threshold",
        integer(0),
        "supported",
        "number of elements below which a parameter stays gathered. The default is 0",
        native="units.persistence_threshold",
        stages=(3,),
        alias="param_persistence_threshold",
    ),
    _key(
        "stage3_max_live_parameters",
        integer(1),
        "supported",
        "largest number of gathered elements at any time",
        native="units.max_live_elements",
        stages=(3,),
        alias="max_live_parameters",
    ),
    _key(
        "leaf_module.classes",
        TEXTS,
        "supported",
        "names of classes to add to units.leaf_modules, without their package",
        stages=(3,),
    ),
    _key(
        "zero_quantized_weights",
        FLAG,
        "supported",
        "whether to set communication.quantized_weights to int8, in blocks of 256 elements",
        harmless=(False,),
        stages=(3,),
    ),
    _key(
        "zero_quantized_gradients",
        FLAG,
        "supported",
        "whether to set communication.quantized_gradients to int4, in blocks of 256 elements",
        harmless=(False,),
        stages=(2, 3),
    ),
    _key(
        "zero_hpz_partition_size",
        integer(0),
        "supported",
        "number of ranks per node. Values above 1 also set communication.hierarchical_partition, and "
        "communication.ranks_per_node to this number",
        harmless=(1, 0),
        stages=(3,),
    ),
    _key(
        "mics_shard_size",
        integer(-1),
        "supported",
        "number of ranks per sharding group. Values above 0 set communication.shard_group_size",
        harmless=(-1,),
        stages=(3,),
    ),
    _key(
        "leaf_module.names", TEXTS, "supported", "names of modules to add to units.leaf_modules", stages=(3,)
    ),
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
    ("contiguous_gradients", True, "the gradients of a unit are always stored in one buffer"),
    ("reduce_scatter", True, "the stage determines the collective"),
    ("use_multi_rank_bucket_allreduce", True, "no bucket belongs to a single rank"),
    ("allgather_partitions", True, "parameters are always gathered with all-gather"),
    ("compute_grad_norm", True, "the norm is computed by the overflow check"),
    ("load_from_fp32_weights", True, "master weights always load from fp32"),
    ("elastic_checkpoint", False, "every checkpoint loads at any world size"),
    ("ignore_unused_parameters", True, "unused parameters are always allowed"),
    ("legacy_stage1", False, "there is one engine for all stages"),
    ("round_robin_gradients", False, "every rank owns a shard of every unit"),
    ("parameter_alignment", False, "the layout of a unit is fixed"),
    ("memory_efficient_linear", False, "linear layers remain torch's own"),
    ("pipeline_loading_checkpoint", False, "checkpoints are always streamed"),
    ("override_module_apply", False, "Module.apply remains torch's own"),
    ("log_trace_cache_warnings", False, "a changed order of modules costs time and is not logged"),
    ("enable_sanity_checks", True, "checks of a unit's state always run"),
    ("save_muon_momentum_buffer_in_memory", False, "Muon is unsupported"),
    ("stage3_gather_fp16_weights_on_model_save", False, _FULL_WEIGHTS),
    ("stage3_gather_16bit_weights_on_model_save", False, _FULL_WEIGHTS),
    ("stage3_use_all_reduce_for_fetch_params", False, "parameters are always gathered with all-gather"),
    ("mics_hierarchical_params_gather", False, "a quantized gather sends each parameter to a node once"),
    ("stage3_allgather_sequential", False, "a unit is gathered directly into its buffer"),
)
_SIZES_WITHOUT_EFFECT = (
    ("allgather_bucket_size", (), _UNITS_DECIDE),
    ("sub_group_size", (), "an optimizer step is one pass over a shard"),
    (
        "stage3_model_persistence_threshold",
        (2**63 - 1,),
        "the total size of parameters that stay gathered is not limited",
    ),
    ("stage3_module_granularity_threshold", (0,), "units are blocks. Set units.block_classes"),
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
    _key(
        "overlap_comm",
        or_null(FLAG),
        "no effect",
        "communication always overlaps with computation",
        harmless=(True, None),
    ),
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
