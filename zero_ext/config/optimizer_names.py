"""Names of optimizers and schedulers that a configuration may give, and why some are refused."""

from __future__ import annotations

from zero_ext.config.schema.config_errors import nearest, show

OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Lamb",
    "Lion",
    "NAdam",
    "OneBitAdam",
    "OneBitLamb",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "ZeroOneAdam",
)
SCHEDULERS = (
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "OneCycle",
    "LRRangeTest",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
_MUP = "its learning rates depend on whole shapes, through package mup; pass the optimizer object instead"
REFUSED_OPTIMIZERS = {
    "Muon": "it orthogonalises whole matrices, which shards do not have; use AdamW",
    "Adafactor": "it factors whole matrices, which shards do not have; use AdamW",
    "LBFGS": "it needs a closure and the inner products of whole parameters; use AdamW",
    "SparseAdam": "it wants sparse gradients, and gradients here are flat and dense; use AdamW",
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
}
_OBJECTS = "it takes Python objects, which a configuration cannot hold; build it and pass it as lr_scheduler"
REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "its step() wants a metric, and the engine's step has none; call it yourself",
    "LambdaLR": _OBJECTS,
    "MultiplicativeLR": _OBJECTS,
    "SequentialLR": _OBJECTS,
    "ChainedScheduler": _OBJECTS,
    "SWALR": _OBJECTS,
}


def optimizer_name(given: str) -> str:
    """The optimizer's proper name, whatever the case of `given`. Raises ValueError for refused and unknown
    ones."""
    return _proper_name("optimizer", given, OPTIMIZERS, REFUSED_OPTIMIZERS)


def scheduler_name(given: str) -> str:
    """The scheduler's proper name, whatever the case of `given`. Raises ValueError for refused and unknown
    ones."""
    return _proper_name("scheduler", given, SCHEDULERS, REFUSED_SCHEDULERS)


def _proper_name(what: str, given: str, known: tuple[str, ...], refused: dict[str, str]) -> str:
    by_lower = {name.lower(): name for name in (*known, *refused)}
    name = by_lower.get(given.lower())
    if name in known:
        return name
    if name is not None:
        raise ValueError(f"{name} is refused: {refused[name]}")
    close = nearest(given.lower(), by_lower)
    hint = f"did you mean {by_lower[close]}?" if close else f"wanted one of {', '.join(known)}"
    raise ValueError(f"got {show(given)}, no {what} known here; {hint}")
