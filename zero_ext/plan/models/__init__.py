"""Models to plan for: by name, by number of parameters, by a Hugging Face config."""

from .model_spec import PlannedModel
from .presets import PRESETS
from .resolve_model import model_named

__all__ = ["PRESETS", "PlannedModel", "model_named"]
