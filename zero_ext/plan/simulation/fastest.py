"""Which placement to train with: all of them simulated, those that fit in the order of their speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.shapes import ModelCost
from zero_ext.plan.simulation.simulate import Simulation, simulate
from zero_ext.plan.simulation.training import ACTIVATIONS, FIRST_STAGE, TIERS, Training


def fastest_placements(model: ModelCost, training: Training, hardware: Hardware) -> list[Simulation]:
    """Every stage and tier of each state kind, and every way to keep activations, else as ``training`` says;
    those that fit, the fastest first.

    Of equally fast ones (within a thousandth) the one that moves less comes first: the lower stage, the nearer
    tiers. Empty if nothing fits.
    """
    found = [simulate(model, candidate, hardware) for candidate in _candidates(training)]
    return sorted((one for one in found if one.fits), key=lambda one: (_rounded(one.seconds), _distance(one)))


def nearest_to_fit(model: ModelCost, training: Training, hardware: Hardware) -> Simulation:
    """The placement that lacks the fewest bytes, for messages where nothing fits."""
    found = (simulate(model, candidate, hardware) for candidate in _candidates(training))
    return min(found, key=lambda one: sum(short.needed - short.available for short in one.shortfalls))


def _candidates(training: Training) -> Iterator[Training]:
    for stage, params, grads, optimizer, activations in product(range(4), TIERS, TIERS, TIERS, ACTIVATIONS):
        tiers = {"params": params, "grads": grads, "optimizer": optimizer}
        if any(tier != "device" and stage < FIRST_STAGE[kind] for kind, tier in tiers.items()):
            continue
        if training.step == "delayed" and optimizer == "device":
            continue
        yield replace(training, stage=stage, activations=activations, **tiers)  # type: ignore[arg-type]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def _distance(one: Simulation) -> tuple[int, ...]:
    training = one.training
    tiers = (TIERS.index(getattr(training, kind)) for kind in FIRST_STAGE)
    return sum(tiers), ACTIVATIONS.index(training.activations), training.stage
