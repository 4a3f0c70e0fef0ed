"""Models to plan for: by name, by number of parameters, by a Hugging Face config."""

from .model_spec import ModelSpec
from .presets import PRESETS
from .resolve_model import model_named

__all__ = ["PRESETS", "ModelSpec", "model_named"]
