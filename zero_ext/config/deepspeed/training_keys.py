"""DeepSpeed keys of batch sizes, precision, optimizer, scheduler and gradients."""

from __future__ import annotations

import math

from .key import ANYTHING, FLAG, MAPPING, TEXT, Fate, Key, ValueType, choice, integer, number, or_null

_DTYPES = choice("fp32", "fp16", "bf16")
_BF16_OVERFLOW = (
    "gradients that are not finite end the step with an error that names them, where DeepSpeed skips it; "
    "true when missing"
)
_PRINT = ValueType(
    "an integer of at least 1, null or infinity",
    lambda value: value in (None, math.inf) or integer(1).fits(value),
)
_MEAN = "gradients are summed in fp32 and divided after that, so scaling them before the sum changes nothing"


def _bf16(name: str, fate: Fate, why: str, *harmless: object, native: str = "") -> Key:
    alias = (f"bfloat16.{name}",)
    return Key(f"bf16.{name}", FLAG, fate, why, native, harmless, True, "bf16.enabled", aliases=alias)


BATCH_KEYS = (
    Key(
        "train_batch_size",
        integer(1),
        "supported",
        "samples of one step over all ranks",
        "batch.train_batch_size",
    ),
    Key(
        "train_micro_batch_size_per_gpu",
        integer(1),
        "supported",
        "samples of one forward pass on one rank",
        "batch.micro_batch_size",
    ),
    Key(
        "gradient_accumulation_steps",
        integer(1),
        "supported",
        "micro-batches of one step",
        "batch.gradient_accumulation_steps",
    ),
    Key(
        "managed_gradient_accumulation",
        FLAG,
        "unsupported",
        "The engine of zero_ext.initialize counts micro-batches itself. Use deepspeed.initialize: its "
        "engine accepts false and then updates at every step()",
        harmless=(True,),
    ),
    Key("dataloader_drop_last", FLAG, "supported", "drop an epoch's last part of a batch", "batch.drop_last"),
    Key("steps_per_print", _PRINT, "supported", "steps between progress lines", "steps_per_print"),
)

PRECISION_KEYS = (
    Key("fp16.enabled", FLAG, "supported", "precision.dtype becomes fp16"),
    Key(
        "fp16.auto_cast",
        FLAG,
        "no effect",
        "floating-point inputs are always cast to fp16 here, in DeepSpeed only if this is true",
        harmless=(True,),
        auto=True,
        switch="fp16.enabled",
    ),
    *(
        Key(f"fp16.{name}", kind, "supported", why, native, auto=True, switch="fp16.enabled")
        for name, kind, why, native in (
            ("loss_scale", number(0, 2.0**126), "fixed loss scale, 0 for a dynamic one", "loss_scale.static"),
            (
                "initial_scale_power",
                integer(0, 126),
                "the dynamic scale starts at 2 to this",
                "loss_scale.initial_power",
            ),
            (
                "loss_scale_window",
                integer(1),
                "steps without overflow until the scale doubles",
                "loss_scale.window",
            ),
            (
                "hysteresis",
                integer(1),
                "the scale halves at the overflow of this number",
                "loss_scale.hysteresis",
            ),
            ("consecutive_hysteresis", FLAG, "refill that tolerance", "loss_scale.consecutive_hysteresis"),
            (
                "min_loss_scale",
                number(2.0**-126, 2.0**126),
                "floor of the dynamic scale",
                "loss_scale.minimum",
            ),
        )
    ),
    Key(
        "fp16.fp16_master_weights_and_grads",
        FLAG,
        "unsupported",
        "Master weights are fp32 here. Remove it",
        harmless=(False,),
        auto=True,
        switch="fp16.enabled",
    ),
    Key("bf16.enabled", FLAG, "supported", "precision.dtype becomes bf16", aliases=("bfloat16.enabled",)),
    _bf16("immediate_grad_update", "no effect", "gradients add up as soon as they exist", True),
    _bf16("check_grad_overflow", "supported", _BF16_OVERFLOW, native="check_finite"),
    _bf16("bf16_master_weights_and_grads", "unsupported", "Master weights are fp32 here. Remove it", False),
    _bf16("bf16_optimizer_states", "supported", "precision.moments_dtype becomes bf16", False),
    Key(
        "data_types.grad_accum_dtype",
        or_null(_DTYPES),
        "supported",
        "fp32 when missing or null",
        "precision.grad_accum_dtype",
    ),
    Key(
        "data_types.param_dtype",
        or_null(_DTYPES),
        "supported",
        "must agree with fp16.enabled and bf16.enabled",
        harmless=(None,),
    ),
    Key(
        "data_types.buffer_dtype",
        or_null(_DTYPES),
        "unsupported",
        "Buffers keep their dtype here. Cast them in the model",
        harmless=(None,),
    ),
    Key(
        "data_types.keep_in_fp32_modules",
        ANYTHING,
        "no effect",
        "buffers keep their dtype here, so none has to be kept from a cast",
        harmless=("auto",),
    ),
    Key(
        "torch_autocast.enabled",
        FLAG,
        "unsupported",
        "The engine starts no autocast. Put `with torch.autocast(...)` around your forward pass",
        harmless=(False,),
    ),
    Key(
        "torch_autocast.dtype",
        TEXT,
        "supported",
        "with torch_autocast.enabled",
        switch="torch_autocast.enabled",
    ),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        ANYTHING,
        "supported",
        "with torch_autocast.enabled",
        switch="torch_autocast.enabled",
    ),
    Key(
        "communication_data_type",
        or_null(_DTYPES),
        "supported",
        "precision of gradients on the wire",
        "precision.communication_dtype",
    ),
)

OPTIMIZER_KEYS = (
    Key("optimizer.type", TEXT, "supported", "an optimizer's name; some are refused, see the list below"),
    Key(
        "optimizer.params",
        MAPPING,
        "supported",
        "keyword arguments. When missing, as in DeepSpeed: lr 0.001 and weight_decay 0 for Adam and AdamW, "
        "lr 0.001 and betas 0.9, 0.999 for Lion. For these torch_adam, set_grad_none, foreach, fused have no "
        "effect; bias_correction and fp32_optimizer_states must be true; max_grad_norm is refused, use "
        "gradient_clipping. For the one-bit family bias_correction, cuda_aware and comm_backend_name "
        "have no effect; amsgrad and eps_inside_sqrt must be false",
    ),
    Key("optimizer.legacy_fusion", FLAG, "no effect", "there is one implementation", harmless=(False,)),
    Key("scheduler.type", TEXT, "supported", "one of the five of DeepSpeed, or of torch's"),
    Key("scheduler.params", MAPPING, "supported", "keyword arguments"),
    Key(
        "zero_allow_untested_optimizer",
        FLAG,
        "no effect",
        "elementwise optimizers run on shards, others are refused; say elementwise=True for one unknown here",
        harmless=(False,),
    ),
    Key(
        "zero_force_ds_cpu_optimizer",
        FLAG,
        "no effect",
        "there is one implementation for each device and it is always used",
        harmless=(False,),
    ),
)

GRADIENT_KEYS = (
    Key(
        "gradient_clipping",
        number(0),
        "supported",
        "largest global gradient norm; 1.0 when missing, as in DeepSpeed 0.19; 0 means no clipping",
        "gradient_clipping",
    ),
    Key("prescale_gradients", FLAG, "no effect", _MEAN, harmless=(False,)),
    Key("gradient_predivide_factor", number(2.0**-126), "no effect", _MEAN, harmless=(1.0, 1)),
    Key(
        "gradient_allreduce_op",
        choice("mean", "sum"),
        "unsupported",
        "Gradients are averaged over the ranks. Multiply your loss by the number of ranks for their sum",
        harmless=("mean",),
    ),
    Key(
        "sparse_gradients",
        FLAG,
        "unsupported",
        "Gradients are flat and dense here. Remove it and build embeddings with sparse=False",
        harmless=(False,),
    ),
)

TRAINING_KEYS = BATCH_KEYS + PRECISION_KEYS + OPTIMIZER_KEYS + GRADIENT_KEYS
