"""Hugging Face's Trainer on sharded models: ``ZeroTrainer``, its mixin, and weights streamed into shards.

Attention and loading need transformers alone, the trainers accelerate as well.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from zero_ext.integrations.transformers.attention_interface import (
        extend_position_embedding,
        sparsify_attention,
    )
    from zero_ext.integrations.transformers.document_interface import apply_document_attention
    from zero_ext.integrations.transformers.pretrained import from_pretrained
    from zero_ext.integrations.transformers.shard_trainers import shard_all_trainers, shard_trainer
    from zero_ext.integrations.transformers.trainer import ZeroTrainer, ZeroTrainerMixin

__all__ = [
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "apply_document_attention",
    "extend_position_embedding",
    "from_pretrained",
    "shard_all_trainers",
    "shard_trainer",
    "sparsify_attention",
]

_PACKAGE = "zero_ext.integrations.transformers"
_MODULES = {
    "ZeroTrainer": f"{_PACKAGE}.trainer",
    "ZeroTrainerMixin": f"{_PACKAGE}.trainer",
    "apply_document_attention": f"{_PACKAGE}.document_interface",
    "extend_position_embedding": f"{_PACKAGE}.attention_interface",
    "from_pretrained": f"{_PACKAGE}.pretrained",
    "shard_all_trainers": f"{_PACKAGE}.shard_trainers",
    "shard_trainer": f"{_PACKAGE}.shard_trainers",
    "sparsify_attention": f"{_PACKAGE}.attention_interface",
}
_find = lazy_getattr(__name__, _MODULES)


def __getattr__(name: str) -> object:
    wanted = ("transformers", "accelerate") if "rainer" in name else ("transformers",)
    missing = [package for package in wanted if find_spec(package) is None]
    if missing and name in _MODULES:
        raise ImportError(
            f"{_PACKAGE}.{name}: {' and '.join(missing)} not installed. Install it with "
            "pip install 'zero_ext[integrations]' or pip install 'transformers>=5.3' accelerate."
        )
    return _find(name)
