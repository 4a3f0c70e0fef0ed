"""TRL's trainers on sharded models, with or without adapters: fine-tuning and preference optimization."""

from __future__ import annotations

try:
    from trl import DPOTrainer, SFTTrainer
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.trl: the package '{error.name}' is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install trl peft."
    ) from error

from zero_ext.integrations.peft import ZeroPeftTrainerMixin

__all__ = ["ZeroDPOTrainer", "ZeroSFTTrainer"]


class ZeroSFTTrainer(ZeroPeftTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` on a sharded model; `peft_config` trains adapters over it.

    It takes what SFTTrainer takes, and `zero_config`, as
    [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin].
    """


class ZeroDPOTrainer(ZeroPeftTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` on a sharded model.

    The reference model is sharded as the policy is, in the same tier. With adapters it is the policy with its
    adapters disabled, and takes no memory.

    It takes what DPOTrainer takes, and `zero_config`.
    """
