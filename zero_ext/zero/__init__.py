"""The ZeRO engine: units, placement, hooks, gradient reduction, the step."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from zero_ext.zero.api.engine_lookup import engine_of
    from zero_ext.zero.api.zero_module import ZeroModule
    from zero_ext.zero.api.zero_optimizer import ZeroOptimizer

    from .engine import Engine

__all__ = ["Engine", "ZeroModule", "ZeroOptimizer", "engine_of"]

# Lazily, because plans count with this package's formulas, which need no torch.
__getattr__ = lazy_getattr(
    __name__,
    {
        "Engine": f"{__name__}.engine",
        "ZeroModule": f"{__name__}.api.zero_module",
        "ZeroOptimizer": f"{__name__}.api.zero_optimizer",
        "engine_of": f"{__name__}.api.engine_lookup",
    },
)
