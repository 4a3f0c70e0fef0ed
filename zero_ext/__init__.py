"""ZeRO for an ordinary PyTorch training loop: sharded parameters, gradients and optimizer state."""

from zero_ext.checkpoint.model import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.safetensors_load import load_safetensors
from zero_ext.config import ConfigError, ZeroConfig, load_config
from zero_ext.integrations import initialize
from zero_ext.optim.lion import Lion
from zero_ext.zero.gathered import (
    double_backward,
    full_gradient,
    full_state_dict,
    gathered,
    load_full_state_dict,
)
from zero_ext.zero.init import Init
from zero_ext.zero.module import ZeroModule
from zero_ext.zero.prepare import prepare
from zero_ext.zero.tiling import TiledEmbedding, TiledLinear

__all__ = [
    "ConfigError",
    "Init",
    "Lion",
    "TiledEmbedding",
    "TiledLinear",
    "ZeroConfig",
    "ZeroModule",
    "double_backward",
    "full_gradient",
    "full_state_dict",
    "gathered",
    "initialize",
    "load_checkpoint",
    "load_config",
    "load_full_state_dict",
    "load_safetensors",
    "prepare",
    "save_checkpoint",
]
