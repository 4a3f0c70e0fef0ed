"""The choice of pipeline, tensor and data parallelism for a model (docs/how_to/parallel.md)."""

from .layout_costs import RankNeeds, StepTime, fullest_rank, rank_needs, step_time
from .layout_search import FoundLayout, best_layouts
from .parallel_layout import LayoutRequest, ParallelLayout, layouts

__all__ = [
    "FoundLayout",
    "LayoutRequest",
    "ParallelLayout",
    "RankNeeds",
    "StepTime",
    "best_layouts",
    "fullest_rank",
    "layouts",
    "rank_needs",
    "step_time",
]
