"""DeepSpeed keys of training: batch sizes, precision, optimizer, scheduler, gradients, and ZeRO."""

from __future__ import annotations

import math

from .deepspeed_keys import (
    ANYTHING,
    FLAG,
    MAPPING,
    TEXT,
    TEXTS,
    Key,
    ValueType,
    choice,
    integer,
    no_effect,
    number,
    or_null,
    section,
    supported,
    unsupported,
)

ZERO = "zero_optimization"

_DTYPES = choice("fp32", "fp16", "bf16")
_PRINT = ValueType(
    "an integer of at least 1, null or infinity",
    lambda value: value in (None, math.inf) or integer(1).fits(value),
)
_MASTERS = "Master weights are fp32 here. Remove it"
_MEAN = "gradients are summed in fp32 and then divided, so scaling them before the sum changes nothing"

# A table, whose rows need no line for each argument.
# fmt: off
_BATCH_KEYS = (
    supported("train_batch_size", integer(1), "number of samples per step over all ranks",
        "batch.train_batch_size"),
    supported("train_micro_batch_size_per_gpu", integer(1), "number of samples per forward pass on one rank",
        "batch.micro_batch_size"),
    supported("gradient_accumulation_steps", integer(1), "number of micro-batches per step",
        "batch.gradient_accumulation_steps"),
    supported("managed_gradient_accumulation", FLAG,
        "whether step() of the engine updates at the last micro-batch of a step, or at every call",
        "batch.managed_gradient_accumulation"),
    supported("dataloader_drop_last", FLAG, "whether to drop the last incomplete batch of an epoch",
        "batch.drop_last"),
    supported("steps_per_print", _PRINT, "number of steps between progress lines", "steps_per_print"),
)

_PRECISION_KEYS = (
    *section(
        "fp16",
        supported("enabled", FLAG, "whether to set precision.dtype to fp16"),
        no_effect("auto_cast", FLAG,
            "floating-point inputs are always cast to fp16 here. DeepSpeed casts them only if this is true",
            True),
        supported("loss_scale", number(0, 2.0**126), "fixed loss scale. 0 means a dynamic scale",
            "loss_scale.static"),
        supported("initial_scale_power", integer(0, 126), "power of two of the initial dynamic scale",
            "loss_scale.initial_power"),
        supported("loss_scale_window", integer(1),
            "number of steps without overflow after which the dynamic scale doubles", "loss_scale.window"),
        supported("hysteresis", integer(1), "number of the overflow at which the dynamic scale halves",
            "loss_scale.hysteresis"),
        supported("consecutive_hysteresis", FLAG,
            "whether every step without overflow resets the count of hysteresis",
            "loss_scale.consecutive_hysteresis"),
        supported("min_loss_scale", number(2.0**-126, 2.0**126), "smallest dynamic scale",
            "loss_scale.minimum"),
        unsupported("fp16_master_weights_and_grads", FLAG, _MASTERS, False),
        switch="enabled",
        auto=True,
    ),
    *section(
        "bf16",
        supported("enabled", FLAG, "whether to set precision.dtype to bf16"),
        no_effect("immediate_grad_update", FLAG,
            "gradients are always accumulated as soon as they are computed", True),
        supported("check_grad_overflow", FLAG,
            "whether non-finite gradients end the step with an error that names them. DeepSpeed skips the "
            "step. The default is true", "check_finite"),
        unsupported("bf16_master_weights_and_grads", FLAG, _MASTERS, False),
        supported("bf16_optimizer_states", FLAG, "whether to set precision.moments_dtype to bf16",
            harmless=(False,)),
        switch="enabled",
        auto=True,
        also="bfloat16",
    ),
    *section(
        "data_types",
        supported("grad_accum_dtype", or_null(_DTYPES),
            "precision in which gradients are accumulated. The default is fp32, and null means fp32",
            "precision.grad_accum_dtype"),
        supported("param_dtype", or_null(_DTYPES),
            "dtype of parameters. It must agree with fp16.enabled and bf16.enabled", harmless=(None,)),
        unsupported("buffer_dtype", or_null(_DTYPES), "Buffers keep their dtype here. Cast them in the model",
            None),
        no_effect("keep_in_fp32_modules", ANYTHING,
            "buffers keep their dtype here, so none needs protection from a cast", "auto"),
    ),
    *section(
        "torch_autocast",
        unsupported("enabled", FLAG,
            "The engine does not start autocast. Put `with torch.autocast(...)` around your forward pass",
            False),
        supported("dtype", TEXT,
            "dtype of autocast. It is checked but not used, since torch_autocast.enabled must be false"),
        supported("lower_precision_safe_modules", ANYTHING,
            "modules of autocast. They are checked but not used, since torch_autocast.enabled must be false"),
        switch="enabled",
    ),
    supported("communication_data_type", or_null(_DTYPES), "precision in which gradients are sent",
        "precision.communication_dtype"),
)

_OPTIMIZER_KEYS = (
    supported("optimizer.type", TEXT, "name of an optimizer from the list above. Some names are unsupported"),
    supported("optimizer.params", MAPPING,
        "keyword arguments of the optimizer. Missing ones have DeepSpeed's defaults, unless torch_adam is "
        "true: lr 0.001 and weight_decay 0 for Adam and AdamW, lr 0.001 and betas 0.9, 0.999 for Lion. Apart "
        "from that, torch_adam, set_grad_none, foreach and fused have no effect for these three, and "
        "bias_correction and fp32_optimizer_states must be true. For one-bit optimizers bias_correction, "
        "cuda_aware and comm_backend_name have no effect, and amsgrad and eps_inside_sqrt must be false. "
        "max_grad_norm is unsupported. Use gradient_clipping. Muon has DeepSpeed's params and defaults: lr "
        "for both muon_lr (0.02) and adam_lr (0.0003), momentum 0.95, weight_decay 0, and betas 0.9, 0.95 "
        "and eps 1e-10 of Adam. Its ns_method runs the iteration in bf16 (standard) or in fp32 (gram), its "
        "adam_w_mode must be true, and its per_head_muon must be false"),
    no_effect("optimizer.legacy_fusion", FLAG, "there is one implementation", False),
    supported("scheduler.type", TEXT, "name of one of DeepSpeed's five schedulers or of a torch scheduler"),
    supported("scheduler.params", MAPPING, "keyword arguments of the scheduler"),
    no_effect("zero_allow_untested_optimizer", FLAG,
        "elementwise optimizers run on shards, and others are unsupported. Pass elementwise=True for an "
        "optimizer that zero_ext does not list", False),
    no_effect("zero_force_ds_cpu_optimizer", FLAG,
        "there is one implementation per device, and it is always used", False),
)

_GRADIENT_KEYS = (
    supported("gradient_clipping", number(0),
        "largest global gradient norm. The default is 1.0, as in DeepSpeed 0.19. 0 disables clipping",
        "gradient_clipping"),
    no_effect("prescale_gradients", FLAG, _MEAN, False),
    no_effect("gradient_predivide_factor", number(2.0**-126), _MEAN, 1.0, 1),
    unsupported("gradient_allreduce_op", choice("mean", "sum"),
        "Gradients are averaged over the ranks. To sum them, multiply your loss by the number of ranks",
        "mean"),
    unsupported("sparse_gradients", FLAG,
        "Gradients are flat and dense here. Remove it and build embeddings with sparse=False", False),
)
# fmt: on

_FULL_WEIGHTS = "full weights are always available from zero_ext.full_state_dict(model)"
_UNITS_DECIDE = "each gather has the size of a unit, which reduce_bucket_size limits in stages 0 to 2"
_STAGE_3 = (3,)


def _unsharded(name: str) -> tuple[str, ...]:
    """Return the name of a key without stage3_, which DeepSpeed accepts for most of them."""
    short = name.removeprefix("stage3_")
    return (short,) if short != name and "fp16" not in name else ()


def _stage_3(name: str, value_type: ValueType, why: str, native: str = "", **more: object) -> Key:
    more.setdefault("stages", _STAGE_3)
    return supported(name, value_type, why, native, auto=True, aliases=_unsharded(name), **more)


# fmt: off
_ZERO_KEYS = section(
    ZERO,
    supported("stage", integer(0, 3), "ZeRO stage. The default is 0, as in DeepSpeed", "stage"),
    supported("reduce_bucket_size", integer(1),
        "largest size of a unit in stages 0 to 2, in elements. The default is 16,777,216",
        "units.bucket_elements", auto=True, stages=(0, 1, 2)),
    _stage_3("stage3_prefetch_bucket_size", integer(0), "number of elements to gather ahead of their use",
        "units.prefetch_elements"),
    _stage_3("stage3_max_reuse_distance", integer(0, 2**63 - 1),
        "largest number of elements used between two uses of a block for which its parameters stay gathered. "
        "The default is 0", "units.reuse_elements"),
    _stage_3("stage3_param_persistence_threshold", integer(0),
        "number of elements below which a parameter stays gathered. The default is 0",
        "units.persistence_threshold"),
    _stage_3("stage3_max_live_parameters", integer(1), "largest number of gathered elements at any time",
        "units.max_live_elements"),
    _stage_3("leaf_module.classes", TEXTS,
        "names of classes to add to units.leaf_modules, without their package"),
    _stage_3("zero_quantized_weights", FLAG,
        "whether to set communication.quantized_weights to int8, in blocks of 256 elements",
        harmless=(False,)),
    _stage_3("zero_quantized_gradients", FLAG,
        "whether to set communication.quantized_gradients to int4, in blocks of 256 elements",
        harmless=(False,), stages=(2, 3)),
    _stage_3("zero_hpz_partition_size", integer(0),
        "number of ranks per node. Values above 1 also set communication.hierarchical_partition, and "
        "communication.ranks_per_node to this number", harmless=(1, 0)),
    _stage_3("mics_shard_size", integer(-1),
        "number of ranks per sharding group. Values above 0 set communication.shard_group_size",
        harmless=(-1,)),
    _stage_3("leaf_module.names", TEXTS, "names of modules to add to units.leaf_modules"),
    unsupported("leaf_module.name_suffixes", TEXTS, "Name the modules in full under leaf_module.names", [],
        "", auto=True),
    # Name, the value that asks for what happens here anyway, the reason.
    *(
        no_effect(name, FLAG, why, calm, auto=True, aliases=_unsharded(name))
        for name, calm, why in (
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
            (
                "save_muon_momentum_buffer_in_memory",
                False,
                "the momentum is stored where offload.optimizer places it",
            ),
            ("stage3_gather_fp16_weights_on_model_save", False, _FULL_WEIGHTS),
            ("stage3_gather_16bit_weights_on_model_save", False, _FULL_WEIGHTS),
            (
                "stage3_use_all_reduce_for_fetch_params",
                False,
                "parameters are always gathered with all-gather",
            ),
            (
                "mics_hierarchical_params_gather",
                False,
                "a quantized gather sends each parameter to a node once",
            ),
            ("stage3_allgather_sequential", False, "a unit is gathered directly into its buffer"),
        )
    ),
    *(
        no_effect(name, integer(0, 2**63 - 1), why, *calm, auto=True, aliases=_unsharded(name))
        for name, why, *calm in (
            ("allgather_bucket_size", _UNITS_DECIDE),
            ("sub_group_size", "an optimizer step is one pass over a shard"),
            (
                "stage3_model_persistence_threshold",
                "the total size of parameters that stay gathered is not limited",
                2**63 - 1,
            ),
            ("stage3_module_granularity_threshold", "units are blocks. Set units.block_classes", 0),
        )
    ),
    no_effect("overlap_comm", or_null(FLAG), "communication always overlaps with computation", True, None,
        auto=True),
    unsupported("zero_quantized_nontrainable_weights", FLAG,
        "Frozen weights keep their precision. Quantize the model itself, or set zero_quantized_weights to "
        "gather them in int8", False, auto=True),
    unsupported("zeropp_loco_param", ANYTHING, "Quantized gradients have no error feedback here. Remove it",
        None, auto=True),
    unsupported("zenflow", ANYTHING, "Split optimizer steps do not exist here. Remove it", None, {},
        auto=True),
)
# fmt: on

TRAINING_KEYS = _BATCH_KEYS + _PRECISION_KEYS + _OPTIMIZER_KEYS + _GRADIENT_KEYS + _ZERO_KEYS
