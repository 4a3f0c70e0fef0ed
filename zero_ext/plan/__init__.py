"""The costs of a placement before anything runs: bytes of model state per rank, elements on the wire."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

from .comm_volume import bytes_sent, collective_elements
from .fixed_slot_pool import slot_pool_bytes
from .onebit_traffic import onebit_state_bytes, onebit_step_bytes
from .state_memory import StateBytes, TrainingState, model_state_bytes, secondary_bytes
from .zeropp_traffic import Sent, step_bytes

if TYPE_CHECKING:
    from .planned_staging import model_staging
    from .tune.trial import Trial

__all__ = [
    "Sent",
    "StateBytes",
    "TrainingState",
    "Trial",
    "bytes_sent",
    "collective_elements",
    "model_staging",
    "model_state_bytes",
    "onebit_state_bytes",
    "onebit_step_bytes",
    "secondary_bytes",
    "slot_pool_bytes",
    "step_bytes",
]

__getattr__ = lazy_getattr(
    __name__, {"Trial": f"{__name__}.tune.trial", "model_staging": f"{__name__}.planned_staging"}
)
