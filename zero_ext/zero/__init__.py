"""The ZeRO engine: units, placement, hooks, gradient reduction, the step."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy import lazily

if TYPE_CHECKING:
    from .engine import Engine
    from .lookup import engine_of
    from .module import ZeroModule
    from .optimizer import ZeroOptimizer

__all__ = ["Engine", "ZeroModule", "ZeroOptimizer", "engine_of"]

# Lazily, because plans count with this package's formulas, which need no torch.
__getattr__ = lazily(
    __name__,
    {
        "Engine": f"{__name__}.engine",
        "ZeroModule": f"{__name__}.module",
        "ZeroOptimizer": f"{__name__}.optimizer",
        "engine_of": f"{__name__}.lookup",
    },
)
