"""The ZeRO engine: units, placement, hooks, gradient reduction, the step."""

from zero_ext.zero.engine import Engine
from zero_ext.zero.lookup import engine_of
from zero_ext.zero.module import ZeroModule
from zero_ext.zero.optimizer import ZeroOptimizer
from zero_ext.zero.prepare import prepare

__all__ = ["Engine", "ZeroModule", "ZeroOptimizer", "engine_of", "prepare"]
