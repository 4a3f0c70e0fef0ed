"""Which lengths of pipeline, tensor and data parallelism to train a model with (docs/parallel.md)."""

from .candidates import Wanted, layouts
from .layout import Layout
from .memory import RankNeeds, fullest_rank, rank_needs
from .search import Found, best_layouts
from .seconds import StepTime, step_time

__all__ = [
    "Found",
    "Layout",
    "RankNeeds",
    "StepTime",
    "Wanted",
    "best_layouts",
    "fullest_rank",
    "layouts",
    "rank_needs",
    "step_time",
]
