"""Hugging Face's Trainer on sharded models: ``ZeroTrainer``, its mixin, and weights streamed into shards."""

from importlib.util import find_spec

_missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
if _missing:
    raise ImportError(
        f"zero_ext.integrations.transformers needs {' and '.join(_missing)}, not installed here: "
        "pip install 'zero_ext[integrations]', or pip install 'transformers>=5' accelerate"
    )

from zero_ext.integrations.transformers.attention import (  # noqa: E402
    extend_position_embedding,
    sparsify_attention,
)
from zero_ext.integrations.transformers.pretrained import from_pretrained  # noqa: E402
from zero_ext.integrations.transformers.trainer import ZeroTrainer, ZeroTrainerMixin  # noqa: E402

__all__ = [
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "extend_position_embedding",
    "from_pretrained",
    "sparsify_attention",
]
