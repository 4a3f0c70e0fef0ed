"""The costs of a placement before anything runs: bytes of model state per rank, elements on the wire."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

from .state_memory import StateBytes, TrainingState, model_state_bytes, secondary_bytes
from .step_traffic import (
    Sent,
    bytes_sent,
    collective_elements,
    expert_exchange_bytes,
    onebit_state_bytes,
    onebit_step_bytes,
    step_bytes,
)

if TYPE_CHECKING:
    from .module_plans import model_staging, slot_pool_bytes
    from .trial import Trial

__all__ = [
    "Sent",
    "StateBytes",
    "TrainingState",
    "Trial",
    "bytes_sent",
    "collective_elements",
    "expert_exchange_bytes",
    "model_staging",
    "model_state_bytes",
    "onebit_state_bytes",
    "onebit_step_bytes",
    "secondary_bytes",
    "slot_pool_bytes",
    "step_bytes",
]

_MODULES = f"{__name__}.module_plans"
__getattr__ = lazy_getattr(
    __name__, {"Trial": f"{__name__}.trial", "model_staging": _MODULES, "slot_pool_bytes": _MODULES}
)
