"""Predict a step's time on hardware you do not have (docs/explanation/simulation.md)."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

from .calibrate import calibrated
from .fastest import fastest_placements, nearest_to_fit
from .hardware import Hardware
from .machines import MACHINES, machine_named
from .published import PUBLISHED, Comparison, Published, compare_published, scaling
from .simulate import Simulation, simulate
from .training_setup import Training
from .transformer_cost import TRANSFORMERS, ModelCost, Transformer, UnitCost, transformer_named

if TYPE_CHECKING:
    from .module_cost import model_cost

__all__ = [
    "MACHINES",
    "PUBLISHED",
    "TRANSFORMERS",
    "Comparison",
    "Hardware",
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

__getattr__ = lazy_getattr(__name__, {"model_cost": f"{__name__}.module_cost"})
