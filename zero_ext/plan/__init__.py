"""What a placement costs before anything runs: bytes of model state per rank, elements on the wire."""

from .memory import StateBytes, TrainingState, model_state_bytes
from .wire import bytes_sent, wire_elements

__all__ = ["StateBytes", "TrainingState", "bytes_sent", "model_state_bytes", "wire_elements"]
