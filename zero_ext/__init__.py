"""ZeRO for an ordinary PyTorch training loop: sharded parameters, gradients and optimizer state."""

from typing import TYPE_CHECKING

from zero_ext.config import ConfigError, ZeroConfig, load_config
from zero_ext.config.lazy_imports import lazy_getattr
from zero_ext.config.optimizer_traits import OPTIMIZERS, TORCH

if TYPE_CHECKING:
    from zero_ext.activation import checkpoint_activations, checkpoint_in_chunks, linear_cross_entropy
    from zero_ext.attention import document_attention
    from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
    from zero_ext.checkpoint.weights.save_weights import save_weights

    # Not in __all__, because they need other packages.
    from zero_ext.integrations.accelerate import ZeroAccelerator as ZeroAccelerator
    from zero_ext.integrations.generation import stream_weights, unsharded_for_generation
    from zero_ext.integrations.initialize import initialize
    from zero_ext.integrations.load_weights import load_weights
    from zero_ext.integrations.prepare_with_features import prepare
    from zero_ext.integrations.transformers import shard_trainer as shard_trainer
    from zero_ext.optim.full_tensors.muon import Muon
    from zero_ext.optim.fused_optimizers import Lamb, Lion
    from zero_ext.optim.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
    from zero_ext.zero.api.full_parameters import (
        full_gradient,
        full_state_dict,
        load_full_state_dict,
    )
    from zero_ext.zero.api.gathered import double_backward, gathered
    from zero_ext.zero.api.sleep import sleep, wake
    from zero_ext.zero.api.zero_module import ZeroModule
    from zero_ext.zero.construction.sharded_init import Init
    from zero_ext.zero.tiling import TiledEmbedding, TiledLinear

__all__ = [
    "ConfigError",
    "Init",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "TiledEmbedding",
    "TiledLinear",
    "ZeroConfig",
    "ZeroModule",
    "ZeroOneAdam",
    "checkpoint_activations",
    "checkpoint_in_chunks",
    "document_attention",
    "double_backward",
    "full_gradient",
    "full_state_dict",
    "gathered",
    "initialize",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_config",
    "load_full_state_dict",
    "load_weights",
    "prepare",
    "save_checkpoint",
    "save_weights",
    "sleep",
    "stream_weights",
    "unsharded_for_generation",
    "wake",
]

_PACKAGES = (
    "activation",
    "attention",
    "checkpoint",
    "cli",
    "comm",
    "data",
    "integrations",
    "monitor",
    "offload",
    "ops",
    "optim",
    "parallel",
    "plan",
    "zero",
)

__getattr__ = lazy_getattr(
    __name__,
    {
        "Init": "zero_ext.zero.construction.sharded_init",
        "TiledEmbedding": "zero_ext.zero.tiling",
        "TiledLinear": "zero_ext.zero.tiling",
        "ZeroAccelerator": "zero_ext.integrations.accelerate",
        "ZeroModule": "zero_ext.zero.api.zero_module",
        "checkpoint_activations": "zero_ext.activation",
        "checkpoint_in_chunks": "zero_ext.activation",
        "document_attention": "zero_ext.attention",
        "double_backward": "zero_ext.zero.api.gathered",
        "full_gradient": "zero_ext.zero.api.full_parameters",
        "full_state_dict": "zero_ext.zero.api.full_parameters",
        "gathered": "zero_ext.zero.api.gathered",
        "initialize": "zero_ext.integrations.initialize",
        "linear_cross_entropy": "zero_ext.activation",
        "load_checkpoint": "zero_ext.checkpoint.api",
        "load_full_state_dict": "zero_ext.zero.api.full_parameters",
        "load_weights": "zero_ext.integrations.load_weights",
        "prepare": "zero_ext.integrations.prepare_with_features",
        "save_checkpoint": "zero_ext.checkpoint.api",
        "save_weights": "zero_ext.checkpoint.weights.save_weights",
        "shard_trainer": "zero_ext.integrations.transformers",
        "sleep": "zero_ext.zero.api.sleep",
        "stream_weights": "zero_ext.integrations.generation",
        "unsharded_for_generation": "zero_ext.integrations.generation",
        "wake": "zero_ext.zero.api.sleep",
    }
    | {each.name: each.module for each in OPTIMIZERS.values() if each.module != TORCH}
    | dict.fromkeys(_PACKAGES, ""),
)
