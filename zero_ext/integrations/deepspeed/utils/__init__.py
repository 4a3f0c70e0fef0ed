"""``deepspeed.utils``: state of single parameters, leaf modules, logging, models on the meta device."""

from zero_ext.integrations.deepspeed.refused import names_of
from zero_ext.integrations.deepspeed.runtime.dataloader import RepeatingLoader
from zero_ext.integrations.deepspeed.utils import groups
from zero_ext.integrations.deepspeed.utils.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zero_ext.integrations.deepspeed.utils.logging import (
    log_dist,
    log_dist_once,
    logger,
    see_memory_usage,
    set_log_level_from_string,
)
from zero_ext.integrations.deepspeed.utils.on_device import OnDevice
from zero_ext.integrations.deepspeed.utils.state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "log_dist_once",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_optimizer_state",
    "see_memory_usage",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

__getattr__ = names_of("deepspeed.utils")
