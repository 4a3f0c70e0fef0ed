"""Build the optimizer and the scheduler that a configuration names."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config import OptimizerConfig, SchedulerConfig
from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import SUGGESTIONS, ConfigError, Problem, nearest, show
from zero_ext.optim import schedulers
from zero_ext.optim.muon import Muon
from zero_ext.optim.optimizer_registry import ENTRIES

_FIVE = {kind.__name__: kind for kind in (getattr(schedulers, name) for name in schedulers.__all__)}
_MODE_KEYS = ("adam_w_mode", "adamw_mode", "adamw")
_OF_ANY_SIGN = ("ns_coefficients",)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NEVER_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "lr_decay", "lambd", "alpha", "rho")


def build_optimizer(
    policy: OptimizerConfig, params: Iterable[Any], model: nn.Module | None = None
) -> Optimizer:
    """Return the optimizer that `policy` names, torch's or one of `zero_ext`'s, over `params` (tensors or
    param groups, as torch takes them) of `model`, from which `zero_ext.Muon` leaves some to AdamW.

    Names are torch's, with one habit of DeepSpeed's: "Adam" means AdamW (decoupled weight decay, Loshchilov
    and Hutter, arXiv 1711.05101) unless params hold adam_w_mode (or adamw) false. Missing params take
    torch's defaults. (The policy itself has already refused optimizers that cannot run on shards or are not
    built here.)

    Raises ConfigError by key path for an unknown parameter, a value of the wrong type or one out of range.
    """
    kind = ENTRIES[policy.type].kind
    settings = dict(policy.params)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        kind = _adam_kind(kind, settings)
    fixed = {"module": model} if kind is Muon else {}
    return _construct("optimizer", kind, list(params), settings, fixed)


def build_scheduler(policy: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler that `policy` names, driving `optimizer`: DeepSpeed's five and torch's that
    numbers describe.

    Raises ConfigError by key path, as `build_optimizer` does.
    """
    kind = _FIVE[policy.type] if policy.type in _FIVE else getattr(lr_scheduler, policy.type)
    return _construct("scheduler", kind, optimizer, dict(policy.params))


def check_scheduler(policy: SchedulerConfig, optimizer: Optimizer) -> None:
    """Raise what `build_scheduler` would, leaving `optimizer` as it is, so before anything is sharded."""
    groups = []
    for group in optimizer.param_groups:
        copied = {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
        groups.append({**copied, "params": [torch.zeros(1, device="cpu")]})
    rehearsal = Optimizer(groups, dict(optimizer.defaults))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # build_scheduler will say it
        build_scheduler(policy, rehearsal)


def _adam_kind(kind: type[Optimizer], settings: dict[str, Any]) -> type[Optimizer]:
    """Settle "Adam or AdamW", taking the keys that say so out of `settings`."""
    modes = {key: settings.pop(key) for key in _MODE_KEYS if key in settings}
    for key, value in modes.items():
        if not isinstance(value, bool):
            raise ConfigError(
                Problem(
                    f"optimizer.params.{key}",
                    f"expected true or false, got {show(value)}. Set it to one of them.",
                )
            )
    if len(set(modes.values())) > 1:
        raise ConfigError(Problem("optimizer.params", f"{modes} contradict each other. Keep one of them."))
    decoupled = all(modes.values())
    if kind is torch.optim.AdamW and not decoupled:
        raise ConfigError(
            Problem(
                "optimizer.type",
                f"AdamW contradicts {modes}. Use type Adam for L2 weight decay, or remove the key.",
            )
        )
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _construct(
    section: str, kind: Any, subject: Any, settings: Mapping[str, Any], fixed: Mapping[str, Any] = _NOTHING
) -> Any:
    """Return ``kind(subject)`` with ``settings``, which are checked, and ``fixed``, which are not."""
    known = dict(list(inspect.signature(kind.__init__).parameters.items())[2:])
    known = {key: parameter for key, parameter in known.items() if key not in fixed}
    problems: list[Problem] = []
    for key, value in settings.items():
        path = f"{section}.params.{key}"
        if key not in known:
            close = nearest(key, known) if len(problems) < SUGGESTIONS else None
            hint = f"Did you mean {close}?" if close else f"Choose one of {', '.join(known)}."
            problems.append(Problem(path, f"{kind.__name__} has no such parameter. {hint}"))
            continue
        wanted = _mismatch(known[key], value)
        if wanted:
            problems.append(Problem(path, f"expected {wanted}, got {show(value)}. Correct it."))
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in settings:
            problems.append(
                Problem(f"{section}.params.{key}", f"{kind.__name__} requires it, and it is missing. Add it.")
            )
    if problems:
        raise ConfigError(problems, section)
    arguments = {
        key: tuple(value) if isinstance(value, list) and isinstance(known[key].default, tuple) else value
        for key, value in settings.items()
    }
    try:
        return kind(subject, **arguments, **fixed)
    except (ValueError, TypeError) as error:
        key, _, text = str(error).partition(": ")
        if key.partition(".")[0] in known:
            raise ConfigError(Problem(f"{section}.params.{key}", text), section) from error
        raise ConfigError(
            Problem(
                f"{section}.params", f"{kind.__name__} refused {settings}. Correct what it names: {error}"
            ),
            section,
        ) from error


def _mismatch(parameter: inspect.Parameter, value: object) -> str | None:
    """Return what was expected instead of `value`, judged by a parameter's default or annotation; None when
    it fits.
    """
    default, annotation = parameter.default, str(parameter.annotation)
    if isinstance(default, bool) or (default is None and "bool" in annotation):
        fits = isinstance(value, bool) or (value is None and default is None)
        return None if fits else "true or false"
    if default is inspect.Parameter.empty and annotation == "int":
        return None if is_number(value) and value >= 1 and value == int(value) else "an integer of at least 1"
    if isinstance(default, tuple) and None in default and isinstance(value, list | tuple):
        value = [0 if item is None else item for item in value]
    if parameter.name in _NEVER_NEGATIVE and not isinstance(default, tuple):
        return None if is_number(value) and value >= 0 else "a finite number of at least 0"
    if isinstance(default, int | float):
        fits = is_number(value) or (
            isinstance(value, list | tuple) and all(is_number(item) for item in value)
        )
        return None if fits else "a finite number"
    if isinstance(default, tuple):
        top = 1.0 if parameter.name == "betas" else math.inf
        low = -math.inf if parameter.name in _OF_ANY_SIGN else 0
        items = value if isinstance(value, list | tuple) else ()
        fits = len(items) == len(default) and all(is_number(item) and low <= item < top for item in items)
        limits = "in [0, 1)" if parameter.name == "betas" else "of any sign" if low else "of at least 0"
        return None if fits else f"a list of {len(default)} numbers {limits}"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a string"
    return None
