"""What a placement costs before anything runs: bytes of model state per rank, elements on the wire."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazily

from .comm_volume import bytes_sent, wire_elements
from .fixed_slot_pool import slot_pool_bytes
from .onebit_traffic import sign_bytes, sign_state_bytes
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
    "model_staging",
    "model_state_bytes",
    "secondary_bytes",
    "sign_bytes",
    "sign_state_bytes",
    "slot_pool_bytes",
    "step_bytes",
    "wire_elements",
]

__getattr__ = lazily(
    __name__, {"Trial": f"{__name__}.tune.trial", "model_staging": f"{__name__}.planned_staging"}
)
