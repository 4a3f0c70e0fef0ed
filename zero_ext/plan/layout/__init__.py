"""Which lengths of pipeline, tensor and data parallelism to train a model with (docs/parallel.md)."""

from .layout_candidates import Wanted, layouts
from .layout_memory import RankNeeds, fullest_rank, rank_needs
from .layout_search import Found, best_layouts
from .layout_time import StepTime, step_time
from .parallel_layout import Layout

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
