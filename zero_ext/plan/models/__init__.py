"""Models to plan for: by name, by number of parameters, by a Hugging Face config."""

from .named import model_named
from .planned import PlannedModel
from .presets import PRESETS

__all__ = ["PRESETS", "PlannedModel", "model_named"]
