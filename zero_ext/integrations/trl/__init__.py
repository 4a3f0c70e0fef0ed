"""TRL's trainers on sharded models: supervised fine-tuning and direct preference optimization."""

try:
    import trl as _trl  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.trl: the package '{error.name}' is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install trl peft."
    ) from error

from zero_ext.integrations.trl.trainers import ZeroDPOTrainer, ZeroSFTTrainer

__all__ = ["ZeroDPOTrainer", "ZeroSFTTrainer"]
