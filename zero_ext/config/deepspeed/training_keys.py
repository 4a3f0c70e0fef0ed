"""DeepSpeed keys of batch sizes, precision, optimizer, scheduler and gradients."""

from __future__ import annotations

import math

from .key import ANYTHING, FLAG, MAPPING, TEXT, Fate, Key, ValueType, choice, integer, number, or_null

_DTYPES = choice("fp32", "fp16", "bf16")
_BF16_OVERFLOW = (
    "whether non-finite gradients end the step with an error that names them. DeepSpeed skips the step. The "
    "default is true"
)
_PRINT = ValueType(
    "an integer of at least 1, null or infinity",
    lambda value: value in (None, math.inf) or integer(1).fits(value),
)
_MEAN = "gradients are summed in fp32 and then divided, so scaling them before the sum changes nothing"


def _bf16(name: str, fate: Fate, why: str, *harmless: object, native: str = "") -> Key:
    alias = (f"bfloat16.{name}",)
    return Key(f"bf16.{name}", FLAG, fate, why, native, harmless, True, "bf16.enabled", aliases=alias)


BATCH_KEYS = (
    Key(
        "train_batch_size",
        integer(1),
        "supported",
        "number of samples per step over all ranks",
        "batch.train_batch_size",
    ),
    Key(
        "train_micro_batch_size_per_gpu",
        integer(1),
        "supported",
        "number of samples per forward pass on one rank",
        "batch.micro_batch_size",
    ),
    Key(
        "gradient_accumulation_steps",
        integer(1),
        "supported",
        "number of micro-batches per step",
        "batch.gradient_accumulation_steps",
    ),
    Key(
        "managed_gradient_accumulation",
        FLAG,
        "unsupported",
        "The engine of zero_ext.initialize counts micro-batches itself. Use deepspeed.initialize. Its "
        "engine accepts false and then updates at every step()",
        harmless=(True,),
    ),
    Key(
        "dataloader_drop_last",
        FLAG,
        "supported",
        "whether to drop the last incomplete batch of an epoch",
        "batch.drop_last",
    ),
    Key("steps_per_print", _PRINT, "supported", "number of steps between progress lines", "steps_per_print"),
)

PRECISION_KEYS = (
    Key("fp16.enabled", FLAG, "supported", "whether to set precision.dtype to fp16"),
    Key(
        "fp16.auto_cast",
        FLAG,
        "no effect",
        "floating-point inputs are always cast to fp16 here. DeepSpeed casts them only if this is true",
        harmless=(True,),
        auto=True,
        switch="fp16.enabled",
    ),
    *(
        Key(f"fp16.{name}", kind, "supported", why, native, auto=True, switch="fp16.enabled")
        for name, kind, why, native in (
            (
                "loss_scale",
                number(0, 2.0**126),
                "fixed loss scale. 0 means a dynamic scale",
                "loss_scale.static",
            ),
            (
                "initial_scale_power",
                integer(0, 126),
                "power of two of the initial dynamic scale",
                "loss_scale.initial_power",
            ),
            (
                "loss_scale_window",
                integer(1),
                "number of steps without overflow after which the dynamic scale doubles",
                "loss_scale.window",
            ),
            (
                "hysteresis",
                integer(1),
                "number of the overflow at which the dynamic scale halves",
                "loss_scale.hysteresis",
            ),
            (
                "consecutive_hysteresis",
                FLAG,
                "whether every step without overflow resets the count of hysteresis",
                "loss_scale.consecutive_hysteresis",
            ),
            (
                "min_loss_scale",
                number(2.0**-126, 2.0**126),
                "smallest dynamic scale",
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
    Key(
        "bf16.enabled",
        FLAG,
        "supported",
        "whether to set precision.dtype to bf16",
        aliases=("bfloat16.enabled",),
    ),
    _bf16(
        "immediate_grad_update",
        "no effect",
        "gradients are always accumulated as soon as they are computed",
        True,
    ),
    _bf16("check_grad_overflow", "supported", _BF16_OVERFLOW, native="check_finite"),
    _bf16("bf16_master_weights_and_grads", "unsupported", "Master weights are fp32 here. Remove it", False),
    _bf16("bf16_optimizer_states", "supported", "whether to set precision.moments_dtype to bf16", False),
    Key(
        "data_types.grad_accum_dtype",
        or_null(_DTYPES),
        "supported",
        "precision in which gradients are accumulated. The default is fp32, and null means fp32",
        "precision.grad_accum_dtype",
    ),
    Key(
        "data_types.param_dtype",
        or_null(_DTYPES),
        "supported",
        "dtype of parameters. It must agree with fp16.enabled and bf16.enabled",
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
        "buffers keep their dtype here, so none needs protection from a cast",
        harmless=("auto",),
    ),
    Key(
        "torch_autocast.enabled",
        FLAG,
        "unsupported",
        "The engine does not start autocast. Put `with torch.autocast(...)` around your forward pass",
        harmless=(False,),
    ),
    Key(
        "torch_autocast.dtype",
        TEXT,
        "supported",
        "dtype of autocast. It is checked but not used, since torch_autocast.enabled must be false",
        switch="torch_autocast.enabled",
    ),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        ANYTHING,
        "supported",
        "modules of autocast. They are checked but not used, since torch_autocast.enabled must be false",
        switch="torch_autocast.enabled",
    ),
    Key(
        "communication_data_type",
        or_null(_DTYPES),
        "supported",
        "precision in which gradients are sent",
        "precision.communication_dtype",
    ),
)

OPTIMIZER_KEYS = (
    Key(
        "optimizer.type",
        TEXT,
        "supported",
        "name of an optimizer from the list above. Some names are unsupported",
    ),
    Key(
        "optimizer.params",
        MAPPING,
        "supported",
        "keyword arguments of the optimizer. Missing ones have DeepSpeed's defaults, unless torch_adam is "
        "true: lr 0.001 and weight_decay 0 for Adam and AdamW, lr 0.001 and betas 0.9, 0.999 for Lion. "
        "Apart from that, torch_adam, set_grad_none, foreach and fused have no effect for these three, and "
        "bias_correction and fp32_optimizer_states must be true. For one-bit optimizers bias_correction, "
        "cuda_aware and comm_backend_name have no effect, and amsgrad and eps_inside_sqrt must be false. "
        "max_grad_norm is unsupported. Use gradient_clipping",
    ),
    Key("optimizer.legacy_fusion", FLAG, "no effect", "there is one implementation", harmless=(False,)),
    Key(
        "scheduler.type",
        TEXT,
        "supported",
        "name of one of DeepSpeed's five schedulers or of a torch scheduler",
    ),
    Key("scheduler.params", MAPPING, "supported", "keyword arguments of the scheduler"),
    Key(
        "zero_allow_untested_optimizer",
        FLAG,
        "no effect",
        "elementwise optimizers run on shards, and others are unsupported. Pass elementwise=True for an "
        "optimizer that zero_ext does not list",
        harmless=(False,),
    ),
    Key(
        "zero_force_ds_cpu_optimizer",
        FLAG,
        "no effect",
        "there is one implementation per device, and it is always used",
        harmless=(False,),
    ),
)

GRADIENT_KEYS = (
    Key(
        "gradient_clipping",
        number(0),
        "supported",
        "largest global gradient norm. The default is 1.0, as in DeepSpeed 0.19. 0 disables clipping",
        "gradient_clipping",
    ),
    Key("prescale_gradients", FLAG, "no effect", _MEAN, harmless=(False,)),
    Key("gradient_predivide_factor", number(2.0**-126), "no effect", _MEAN, harmless=(1.0, 1)),
    Key(
        "gradient_allreduce_op",
        choice("mean", "sum"),
        "unsupported",
        "Gradients are averaged over the ranks. To sum them, multiply your loss by the number of ranks",
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
