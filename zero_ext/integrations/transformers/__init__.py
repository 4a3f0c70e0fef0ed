"""Hugging Face's Trainer on sharded models: ``ZeroTrainer``, its mixin, and weights streamed into shards."""

try:
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.transformers needs the package '{error.name}'; install it with: "
        "pip install 'zero_ext[integrations]', or pip install 'transformers>=5' accelerate"
    ) from error

from zero_ext.integrations.transformers.pretrained import from_pretrained
from zero_ext.integrations.transformers.trainer import ZeroTrainer, ZeroTrainerMixin

__all__ = ["ZeroTrainer", "ZeroTrainerMixin", "from_pretrained"]
