"""DeepSpeed's optimizer classes, which code outside asks about with ``isinstance``."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError, names_of
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer
from zero_ext.zero.engine import Engine


class _OfStages(type):
    stages: tuple[int, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ZeroOptimizer) and instance.engine.config.stage in cls.stages

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise DeepSpeedFeatureError(
            f"{cls.__name__}: expected one from deepspeed.initialize, got a call. Use what that returns."
        )


class DeepSpeedOptimizer(metaclass=_OfStages):
    """The class of the engine's optimizer in all stages, for ``isinstance`` alone."""

    stages: tuple[int, ...] = (0, 1, 2, 3)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The class of the engine's optimizer in stages that shard, for ``isinstance`` alone."""

    stages: tuple[int, ...] = (1, 2, 3)


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The class of the engine's optimizer in stages 1 and 2, for ``isinstance`` alone."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """The class of the engine's optimizer in stage 3, for ``isinstance`` alone."""

    stages = (3,)


class DeepSpeedZeRoOffload:
    """The parameters' side of stage 3. Callers reach through it for the model and its forward hooks, which
    they take off around generation.

    No hook has to go: a forward inside ``GatheredParameters`` of the whole model gathers nothing, releases
    nothing and leaves no trace in the order of look-ahead. The lists of hooks are therefore empty.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> nn.Module:
        """The prepared model."""
        return self._engine.model

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: no hooks of ``module`` were taken off."""


def external_parameters() -> tuple[()]:
    """Return no parameters: those that a module of the model uses of another are found when it reads them."""
    return ()


def with_parameter_offload(
    model: nn.Module, optimizer: ZeroOptimizer | None
) -> ZeroOptimizer | DeepSpeedZeRoOffload | None:
    """Return what ``engine.optimizer`` is. In stage 3 an engine without an optimizer has its
    :class:`DeepSpeedZeRoOffload` there, and an optimizer has it as ``parameter_offload``."""
    engine = engine_of(model)
    if engine.config.stage != 3:
        return optimizer
    model.ds_external_parameters = external_parameters  # type: ignore[assignment]
    offload = DeepSpeedZeRoOffload(engine)
    if optimizer is None:
        return offload
    optimizer.parameter_offload = offload  # type: ignore[attr-defined]
    return optimizer


__getattr__ = names_of("deepspeed.runtime.base_optimizer", "deepspeed.runtime.zero.parameter_offload")
