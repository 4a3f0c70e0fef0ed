"""Short measured trials of a training script over configurations, and the best of them."""

from .analytic_pruning import Forecast
from .search_space import Point, Space
from .trial import Trial
from .trial_process import Launch, Outcome, run_trial
from .tuning_search import Measured, Tuning, search

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
