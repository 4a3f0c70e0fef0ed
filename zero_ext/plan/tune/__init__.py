"""Short measured trials of a training script over configurations, and the best of them."""

from .child import Launch, Outcome, run_trial
from .points import Point, Space
from .prune import Forecast
from .search import Measured, Tuning, search
from .trial import Trial

__all__ = [
    "Forecast",
    "Launch",
    "Measured",
    "Outcome",
    "Point",
    "Space",
    "Trial",
    "Tuning",
    "run_trial",
    "search",
]
