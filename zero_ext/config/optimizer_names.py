"""Names of optimizers and schedulers that a configuration may give, and why some are refused."""

from __future__ import annotations

from zero_ext.config.schema.base_section import KeyProblem
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
_MUP = "Its learning rates depend on full shapes, through package mup. Pass the optimizer object instead"
UNSUPPORTED_OPTIMIZERS = {
    "Muon": "It orthogonalizes full matrices, which shards do not have. Use AdamW",
    "Adafactor": "It factors full matrices, which shards do not have. Use AdamW",
    "LBFGS": "It needs a closure and the inner products of full parameters. Use AdamW",
    "SparseAdam": "It needs sparse gradients, and gradients here are flat and dense. Use AdamW",
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
}
_OBJECTS = "It needs Python objects, which a configuration cannot hold. Build it and pass it as lr_scheduler"
UNSUPPORTED_SCHEDULERS = {
    "ReduceLROnPlateau": "Its step() needs a metric, and the engine's step has none. Call it yourself",
    "LambdaLR": _OBJECTS,
    "MultiplicativeLR": _OBJECTS,
    "SequentialLR": _OBJECTS,
    "ChainedScheduler": _OBJECTS,
    "SWALR": _OBJECTS,
}


def optimizer_name(written: str) -> str:
    """Return the canonical name of an optimizer, `written` in any case. Raise ValueError if unsupported."""
    return _canonical_name("optimizer", written, OPTIMIZERS, UNSUPPORTED_OPTIMIZERS)


def scheduler_name(written: str) -> str:
    """Return the canonical name of a scheduler, `written` in any case. Raise ValueError if unsupported."""
    return _canonical_name("scheduler", written, SCHEDULERS, UNSUPPORTED_SCHEDULERS)


def _canonical_name(what: str, written: str, known: tuple[str, ...], unsupported: dict[str, str]) -> str:
    by_lower = {name.lower(): name for name in (*known, *unsupported)}
    name = by_lower.get(written.lower())
    if name in known:
        return name
    if name is not None:
        raise KeyProblem("", f"expected a supported {what}, got {name}. {unsupported[name]}.")
    close = nearest(written.lower(), by_lower)
    hint = f"Did you mean {by_lower[close]}?" if close else f"Choose one of {', '.join(known)}."
    raise KeyProblem("", f"expected a known {what}, got {show(written)}. {hint}")
