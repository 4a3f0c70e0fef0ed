"""``deepspeed.zero``: sharded initialization, gathered parameters, tiles, memory estimates."""

from zero_ext.integrations.deepspeed.param_attributes import ZeroParamStatus, ZeroParamType
from zero_ext.integrations.deepspeed.unsupported import names_of
from zero_ext.integrations.deepspeed.zero.constructor_patch import (
    _orig_torch_arange,
    get_accelerator,
    zero_wrapper_for_fp_tensor_constructor,
)
from zero_ext.integrations.deepspeed.zero.deepspeed_init import Init
from zero_ext.integrations.deepspeed.zero.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zero_ext.integrations.deepspeed.zero.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unwrap_model_for_generation,
)
from zero_ext.integrations.deepspeed.zero.tiling import TiledLinear
from zero_ext.integrations.deepspeed.zero.zero_optimizer_types import (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "ZeroParamStatus",
    "ZeroParamType",
    "_orig_torch_arange",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_accelerator",
    "register_external_parameter",
    "unwrap_model_for_generation",
    "zero_wrapper_for_fp_tensor_constructor",
]

__getattr__ = names_of("deepspeed.runtime.zero")
