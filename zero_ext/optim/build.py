"""Build the optimizer and the scheduler that a configuration names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config import OptimizerPolicy, SchedulerPolicy
from zero_ext.config.errors import ConfigError, Problem, nearest, show

from . import schedulers

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
}
_REFUSED_OPTIMIZERS = {
    "Lamb": "its trust ratio needs the norms of whole parameters, which shards do not have; use AdamW",
    "Lion": "it is not built here; use AdamW",
    "OneBitAdam": "compressed communication is not built here; use AdamW",
    "ZeroOneAdam": "compressed communication is not built here; use AdamW",
    "OneBitLamb": "compressed communication is not built here; use AdamW",
    "Muon": "it orthogonalises whole matrices, which shards do not have; use AdamW",
    "Adafactor": "it factors whole matrices, which shards do not have; use AdamW",
    "LBFGS": "it needs a closure and the inner products of whole parameters; use AdamW",
    "SparseAdam": "it wants sparse gradients, and gradients here are flat and dense; use AdamW",
    "MuAdam": "its learning rates depend on whole shapes, through package mup; pass the optimizer object instead",
    "MuAdamW": "its learning rates depend on whole shapes, through package mup; pass the optimizer object instead",
    "MuSGD": "its learning rates depend on whole shapes, through package mup; pass the optimizer object instead",
}
_SCHEDULERS: dict[str, type[LRScheduler]] = {
    kind.__name__: kind
    for kind in (
        schedulers.WarmupLR,
        schedulers.WarmupDecayLR,
        schedulers.WarmupCosineLR,
        schedulers.OneCycle,
        schedulers.LRRangeTest,
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.CyclicLR,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.OneCycleLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.StepLR,
    )
}
_REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "its step() wants a metric, which a step without arguments cannot give",
    **dict.fromkeys(
        ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "SWALR"),
        "it takes Python objects, which a configuration cannot hold; build it and pass it as lr_scheduler",
    ),
}
_MODE_KEYS = ("adam_w_mode", "adamw_mode", "adamw")


def build_optimizer(policy: OptimizerPolicy, params: Iterable[Any]) -> Optimizer:
    """The torch optimizer that `policy` names, over `params` (tensors or param groups, as torch takes them).

    Names follow torch without regard to case, with one habit of DeepSpeed's: "Adam" means AdamW (decoupled weight
    decay, Loshchilov and Hutter, arXiv 1711.05101) unless params hold adam_w_mode (or adamw) false. Missing params
    take torch's defaults.

    Raises ConfigError by key path: an optimizer that cannot run on shards or is not built here (with the reason), an
    unknown one (with the nearest known one), an unknown parameter, a value of the wrong type or out of range.
    """
    kind = _lookup("optimizer", policy.type, _OPTIMIZERS, _REFUSED_OPTIMIZERS)
    settings = dict(policy.params)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        kind = _adam_kind(kind, settings)
    return _construct("optimizer", kind, list(params), settings)


def build_scheduler(policy: SchedulerPolicy, optimizer: Optimizer) -> LRScheduler:
    """The scheduler that `policy` names, driving `optimizer`: DeepSpeed's five and torch's that numbers describe.

    Raises ConfigError by key path, as `build_optimizer` does.
    """
    kind = _lookup("scheduler", policy.type, _SCHEDULERS, _REFUSED_SCHEDULERS)
    return _construct("scheduler", kind, optimizer, dict(policy.params))


def _lookup(section: str, name: str, known: Mapping[str, Any], refused: Mapping[str, str]) -> Any:
    path = f"{section}.type"
    by_lower = {key.lower(): key for key in (*known, *refused)}
    key = by_lower.get(name.lower())
    if key in known:
        return known[key]
    if key is not None:
        raise ConfigError(Problem(path, f"{name} is refused: {refused[key]}"))
    close = nearest(name.lower(), by_lower)
    hint = f"did you mean {by_lower[close]}?" if close else f"known: {', '.join(sorted(known))}"
    raise ConfigError(Problem(path, f"got {show(name)}, which is no {section} known here; {hint}"))


def _adam_kind(kind: type[Optimizer], settings: dict[str, Any]) -> type[Optimizer]:
    """Settle "Adam or AdamW", taking the keys that say so out of `settings`."""
    given = {key: settings.pop(key) for key in _MODE_KEYS if key in settings}
    for key, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(Problem(f"optimizer.params.{key}", f"got {show(value)}, wanted true or false"))
    if len(set(given.values())) > 1:
        raise ConfigError(Problem("optimizer.params", f"{given} contradict each other; keep one"))
    decoupled = all(given.values())
    if kind is torch.optim.AdamW and not decoupled:
        raise ConfigError(
            Problem(
                "optimizer.type",
                f"AdamW contradicts {given}; use type Adam for L2 weight decay, or drop the key",
            )
        )
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _construct(section: str, kind: Any, subject: Any, settings: dict[str, Any]) -> Any:
    signature = inspect.signature(kind.__init__)
    known = {name: value for name, value in list(signature.parameters.items())[2:]}
    problems = []
    for key, value in settings.items():
        path = f"{section}.params.{key}"
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(known)}"
            problems.append(Problem(path, f"{kind.__name__} takes no such parameter; {hint}"))
            continue
        wanted = _mismatch(known[key].default, value)
        if wanted:
            problems.append(Problem(path, f"got {show(value)}, wanted {wanted}"))
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in settings:
            problems.append(Problem(f"{section}.params.{key}", f"required by {kind.__name__} but missing"))
    if problems:
        raise ConfigError(problems)
    arguments = {
        key: tuple(value) if _is_pair(known[key].default, value) else value for key, value in settings.items()
    }
    try:
        return kind(subject, **arguments)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(Problem(f"{section}.params", f"{kind.__name__}({settings}): {error}")) from error


def _is_pair(default: object, value: object) -> bool:
    return isinstance(default, tuple) and isinstance(value, list)


def _mismatch(default: object, value: object) -> str | None:
    """What kind of value was wanted instead of `value`, judged by the parameter's default; None when it fits."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not math.isfinite(float(value)):  # type: ignore[arg-type]
        return "a finite number"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return None if number or isinstance(value, list | tuple) else "a number"
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        fits = fits and all(_mismatch(0.0, item) is None for item in value)  # type: ignore[union-attr]
        return None if fits else f"a list of {len(default)} numbers"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a string"
    return None
