"""The check whether a user's optimizer can run on shards: element-wise ones, by list or by trial."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from zero_ext.config.zero_config import ONE_BIT
from zero_ext.optim.lamb import Lamb
from zero_ext.optim.lion import Lion
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    Lion,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
NEEDS_FULL_TENSORS: dict[str, str] = {
    "LBFGS": "its line search and inner products run over all parameters together",
    "Adafactor": "it factors the second moment over rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it expects sparse gradients, sharded gradients are dense",
}
_INSTEAD = (
    "Use torch's AdamW, Adam, SGD, Adagrad or RMSprop, in a Hugging Face Trainer optim='adamw_torch', 'sgd', "
    "'adagrad' or 'rmsprop'. To save memory offload the optimizer, or keep AdamW's moments in 8 or 16 bits: "
    "precision.moments_dtype '8bit' or 'bf16', in DeepSpeed's JSON bf16.bf16_optimizer_states true."
)


def fusible(optimizer: optim.Optimizer) -> bool:
    """Return whether a fused op computes what ``optimizer`` would: Lamb, Lion, one that exchanges signs, or
    what :func:`streamable` is.
    """
    return type(optimizer) in (Lamb, Lion) or is_one_bit(optimizer) or streamable(optimizer)


def check_step_time(optimizer: optim.Optimizer, when: str) -> None:
    """Raise ``ValueError`` if ``optimizer`` cannot run its updates at the time ``when``, a value of
    ``offload.update_mode``."""
    if isinstance(optimizer, Lamb) and when != "after_backward":
        raise ValueError(
            f"offload.update_mode: expected 'after_backward' with Lamb, got '{when}'. Its trust ratios "
            "need the norms of all ranks, which are summed once for all layers, when all gradients are "
            "ready and before any weight changes. Set offload.update_mode to 'after_backward'."
        )


def is_one_bit(optimizer: optim.Optimizer | None) -> bool:
    """Return whether ``optimizer`` is one of the one-bit family."""
    return isinstance(optimizer, OneBitOptimizer)


def resumes_from(own: str | None, saved: str | None) -> bool:
    """Return whether an optimizer of the class named ``own`` takes over state of the one named ``saved``: its
    own, or, for one that exchanges signs, that of one with the same two moments.
    """
    if own == "OneBitLamb":
        return saved in ("Lamb", "OneBitLamb")
    return own == saved or (own in ONE_BIT and saved in ("Adam", "AdamW", "OneBitAdam", "ZeroOneAdam"))


def streamable(optimizer: optim.Optimizer) -> bool:
    """Return whether the fused op also steps state on NVMe, in one pipeline: Adam or AdamW without amsgrad.
    For others the optimizer's own code steps chunks there.
    """
    if type(optimizer) not in (optim.Adam, optim.AdamW):
        return False
    return not any(group["amsgrad"] or group.get("differentiable") for group in optimizer.param_groups)


def check_elementwise(optimizer: optim.Optimizer, declared: bool) -> None:
    """Refuse with ``ValueError`` what cannot run on shards; tries out what the user declares
    element-wise."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        if base.__name__ in NEEDS_FULL_TENSORS:
            reason = NEEDS_FULL_TENSORS[base.__name__]
            raise ValueError(f"optimizer {name}: it cannot run on sharded state: {reason}. {_INSTEAD}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer {name}: expected differentiable=False on shards, got True. Leave it False."
        )
    if kind in ELEMENTWISE:
        return
    if not declared:
        raise ValueError(
            f"optimizer {name}: it is not known to be element-wise, which running on shards needs. "
            f"{_INSTEAD} If each element's update depends on that element alone, pass elementwise=True to "
            "zero_ext.prepare, which then checks it once on a small vector."
        )
    _try_out(optimizer, name)


def _try_out(optimizer: optim.Optimizer, name: str) -> None:
    generator = torch.Generator().manual_seed(20)
    values = torch.randn(64, generator=generator, device="cpu")
    gradients = [torch.randn(64, generator=generator, device="cpu") for _ in range(3)]
    for group in optimizer.param_groups:
        full = _run(optimizer, group, [values.clone()], [[g.clone()] for g in gradients])
        cut = [values[:23].clone(), values[23:].clone()]
        split = _run(optimizer, group, cut, [[g[:23].clone(), g[23:].clone()] for g in gradients])
        if not torch.equal(full, split):
            raise ValueError(
                f"optimizer {name}: it was declared element-wise, but a vector stepped in two slices comes "
                "out different from the same vector stepped as one (by up to "
                f"{(full - split).abs().max():.3g}). It cannot run on shards. {_INSTEAD}"
            )


def _run(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> torch.Tensor:
    trial = on_other_tensors(optimizer, [{**group, "params": values}])
    for value in values:
        trial.state[value] = initial_state(optimizer, value, group)
    for step in gradients:
        for value, gradient in zip(values, step, strict=True):
            value.grad = gradient
        trial.step()
    return torch.cat(values)


def initial_state(
    optimizer: optim.Optimizer, value: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the state of ``value`` before the first step, for the classes that make it at construction, and
    for Lion: its fused stepper does.
    """
    if type(optimizer) is Lion:
        return {"exp_avg": torch.zeros_like(value)}
    if not isinstance(optimizer, optim.Adagrad):
        return {}
    return {
        "step": torch.tensor(0.0, device="cpu"),
        "sum": torch.full_like(value, group["initial_accumulator_value"]),
    }


def was_stepped(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer`` holds more than the state that its class makes at construction."""
    filled = [state for state in optimizer.state.values() if state]
    return any("step" not in state or float(state["step"]) != 0 for state in filled)


def elementwise_kinds(optimizer: optim.Optimizer, group: dict[str, Any]) -> frozenset[str]:
    """Names of the state tensors, one value an element, that ``optimizer`` has after a step; by trial."""
    value = torch.zeros(2, device="cpu")
    trial = on_other_tensors(optimizer, [{**group, "params": [value]}])
    trial.state[value] = initial_state(optimizer, value, group)
    value.grad = torch.ones(2, device="cpu")
    trial.step()
    return frozenset(name for name, entry in trial.state[value].items() if per_element(entry))


def per_element(entry: object) -> bool:
    """Return whether an entry of an optimizer's state has one value an element, rather than one a
    parameter.
    """
    return isinstance(entry, torch.Tensor) and entry.dim() > 0


def plain_scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's state that are one value each, JSON-able; see
    :func:`live_scalars`.
    """
    scalars = {name: entry for name, entry in state.items() if not per_element(entry)}
    return {
        "scalars": {
            name: entry.item() if isinstance(entry, torch.Tensor) else entry
            for name, entry in scalars.items()
        },
        "zero_dim": [name for name, entry in scalars.items() if isinstance(entry, torch.Tensor)],
    }


def live_scalars(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`plain_scalars` was given, less the entries with one value an element."""
    return {
        name: torch.tensor(entry, device="cpu") if name in saved["zero_dim"] else entry
        for name, entry in saved["scalars"].items()
    }


def on_other_tensors(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Return an optimizer of the same class and settings with fresh state over the tensors in ``groups``."""
    made = copy.copy(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = groups
    return made
