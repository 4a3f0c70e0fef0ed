"""DeepSpeed's optimizer classes, which code outside asks about with ``isinstance``."""

from __future__ import annotations

from typing import Any, NoReturn

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError
from zero_ext.zero.optimizer import ZeroOptimizer


class _OfStages(type):
    stages: tuple[int, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and instance.engine.config.stage in cls.stages

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise DeepSpeedFeatureError(
            f"{cls.__name__}: expected one from deepspeed.initialize, got a call. Use what that returns."
        )


class DeepSpeedZeroOptimizer(metaclass=_OfStages):
    """The class of the engine's optimizer in stages 1 and 2, for ``isinstance`` alone."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStages):
    """The class of the engine's optimizer in stage 3, for ``isinstance`` alone."""

    stages = (3,)
