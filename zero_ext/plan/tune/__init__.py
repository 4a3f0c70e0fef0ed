"""Short measured trials of a training script over configurations, and the best of them."""

from .analytic_pruning import Prediction
from .search_space import Point, Space
from .trial import Trial
from .trial_process import Launch, TrialOutcome, run_trial
from .tuning_search import TrialResult, Tuning, search

__all__ = [
    "Launch",
    "Point",
    "Prediction",
    "Space",
    "Trial",
    "TrialOutcome",
    "TrialResult",
    "Tuning",
    "run_trial",
    "search",
]
