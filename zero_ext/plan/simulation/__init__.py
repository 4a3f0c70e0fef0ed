"""Predict a step's time on hardware you do not have (docs/explanation/simulation.md)."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

from .hardware import MACHINES, Hardware, machine_named
from .mixture import Mixture
from .published import PUBLISHED, Comparison, Published, compare_published, scaling
from .simulate import Simulation, calibrated, fastest_placements, nearest_to_fit, simulate
from .training_setup import Training
from .transformer_cost import TRANSFORMERS, ModelCost, Transformer, UnitCost, transformer_named

if TYPE_CHECKING:
    from zero_ext.plan.module_plans import model_cost

__all__ = [
    "MACHINES",
    "PUBLISHED",
    "TRANSFORMERS",
    "Comparison",
    "Hardware",
    "Mixture",
    "ModelCost",
    "Published",
    "Simulation",
    "Training",
    "Transformer",
    "UnitCost",
    "calibrated",
    "compare_published",
    "fastest_placements",
    "machine_named",
    "model_cost",
    "nearest_to_fit",
    "scaling",
    "simulate",
    "transformer_named",
]

__getattr__ = lazy_getattr(__name__, {"model_cost": "zero_ext.plan.module_plans"})
