"""``deepspeed.ops.adam``, ``.adagrad``, ``.lamb``, ``.lion``: optimizers by DeepSpeed's names and arguments.

Making one gives torch's or zero_ext's own optimizer, which works by itself, and which ``initialize`` and
``zero_ext.prepare`` run fused over the shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.optim.fused_optimizers import Lamb, Lion
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer
from zero_ext.zero.engine import Engine

_16_BIT_STATES = {"fp32_optimizer_states": "write bf16.bf16_optimizer_states in the JSON"}
_CORRECTED = {"bias_correction": "the moments are always corrected here"}
_AMSGRAD = {"amsgrad": "neither DeepSpeed nor zero_ext has that variant"}


def _named(
    name: str,
    make: Callable[..., Optimizer],
    fixed: Mapping[str, str],
    parameters: str = "params",
    **defaults: Any,
) -> type:
    """Return a class that makes another one's optimizers.

    Args:
        name: what DeepSpeed calls the class.
        make: takes the parameters and every argument that is not fixed.
        fixed: arguments that must be left alone, with the reason or what to do instead.
        parameters: the first argument's name.
        defaults: DeepSpeed's other arguments in order. ``set_grad_none`` changes nothing.
    """
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    others = [inspect.Parameter(each, kinds, default=value) for each, value in defaults.items()]
    signature = inspect.Signature([inspect.Parameter(parameters, kinds), *others])

    def new(cls: type, *args: Any, **kwargs: Any) -> Optimizer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        for argument, reason in fixed.items():
            value = options.pop(argument)
            if value != defaults[argument]:
                raise DeepSpeedFeatureError(f"{name}({argument}={value}): {reason}")
        options.pop("set_grad_none", None)
        return make(options.pop(parameters), **options)

    doc = f"``{name}{signature}`` makes an optimizer of torch or zero_ext. These stay as they are: "
    members = {"__new__": new, "__signature__": signature, "__doc__": f"{doc}{', '.join(fixed) or 'none'}."}
    return type(name, (), members | {"__module__": __name__})


def _cpu_adam(params: Any, *, adamw_mode: bool, **options: Any) -> Optimizer:
    return (AdamW if adamw_mode else Adam)(params, **options)


def _fused_adam(params: Any, *, adam_w_mode: bool, **options: Any) -> Optimizer:
    return _cpu_adam(params, adamw_mode=adam_w_mode, **options)


# A table, whose rows need no line for each argument.
# fmt: off
DeepSpeedCPUAdam = _named(
    "DeepSpeedCPUAdam", _cpu_adam, _CORRECTED | _16_BIT_STATES, "model_params", lr=1e-3, bias_correction=True,
    betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, adamw_mode=True,
    fp32_optimizer_states=True,
)
FusedAdam = _named(
    "FusedAdam", _fused_adam, _CORRECTED | _AMSGRAD, lr=1e-3, bias_correction=True, betas=(0.9, 0.999),
    eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True,
)
DeepSpeedCPUAdagrad = _named(
    "DeepSpeedCPUAdagrad", Adagrad, _AMSGRAD | _16_BIT_STATES, "model_params", lr=1e-2, eps=1e-10,
    weight_decay=0.0, amsgrad=False, fp32_optimizer_states=True,
)
FusedLamb = _named(
    "FusedLamb", Lamb, _AMSGRAD | {"max_grad_norm": "write gradient_clipping in the JSON"}, lr=1e-3,
    bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0,
    max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False,
)
FusedLion = _named("FusedLion", Lion, {}, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, set_grad_none=True)
DeepSpeedCPULion = _named(
    "DeepSpeedCPULion", Lion, _16_BIT_STATES, "model_params", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0,
    fp32_optimizer_states=True,
)
# fmt: on


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
