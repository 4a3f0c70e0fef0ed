"""PEFT's adapters over a sharded base model: LoRA and QLoRA under ZeRO-3, adapter-only saves."""

try:
    import peft as _peft  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.peft: the package '{error.name}' is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install peft."
    ) from error

from zero_ext.integrations.peft.adapters import adapter_state_dict, load_adapter_weights, mark_adapters
from zero_ext.integrations.peft.peft_trainer import ZeroPeftTrainer, ZeroPeftTrainerMixin
from zero_ext.integrations.peft.prepare_adapters import prepare

__all__ = [
    "ZeroPeftTrainer",
    "ZeroPeftTrainerMixin",
    "adapter_state_dict",
    "load_adapter_weights",
    "mark_adapters",
    "prepare",
]
