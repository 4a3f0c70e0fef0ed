"""The choice of pipeline, tensor and data parallelism for a model (docs/how_to/parallel.md)."""

from .layout_candidates import LayoutRequest, layouts
from .layout_memory import RankNeeds, fullest_rank, rank_needs
from .layout_search import FoundLayout, best_layouts
from .layout_time import StepTime, step_time
from .parallel_layout import ParallelLayout

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
