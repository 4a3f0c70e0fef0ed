"""What a placement costs before anything runs: bytes of model state per rank, elements on the wire."""

from .memory import StateBytes, TrainingState, model_state_bytes
from .slots import slot_pool_bytes
from .staging import model_staging
from .wire import bytes_sent, wire_elements

__all__ = [
    "StateBytes",
    "TrainingState",
    "bytes_sent",
    "model_staging",
    "model_state_bytes",
    "slot_pool_bytes",
    "wire_elements",
]
