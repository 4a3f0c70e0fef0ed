"""The fastest placements: those that fit are simulated and sorted by speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import fits, memory_needs
from zero_ext.plan.simulation.simulate import Simulation, simulate
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, FIRST_STAGE, TIERS, Training
from zero_ext.plan.simulation.transformer_cost import ModelCost

ALIKE = 1.01


def fastest_placements(model: ModelCost, training: Training, hardware: Hardware) -> list[Simulation]:
    """Return the placements that fit, the fastest first.

    Tried are every stage, tier of each state kind and strategy for activations. What takes at most a
    hundredth longer than the fastest and moves less comes before it: nearer tiers, activations nearer, a
    lower stage.

    Args:
        model: the cost of its units.
        training: everything else, such as the world size.
        hardware: the machine.

    Returns:
        Simulations; none if nothing fits.
    """
    found = [simulate(model, one, hardware) for one in _candidates(training) if fits(model, one, hardware)]
    quickest = min((one.seconds for one in found), default=0.0)
    return sorted(
        found, key=lambda one: (0.0, *_distance(one)) if one.seconds <= ALIKE * quickest else (one.seconds,)
    )


def nearest_to_fit(model: ModelCost, training: Training, hardware: Hardware) -> Simulation:
    """Return the placement that lacks the fewest bytes, for messages where nothing fits.

    Args:
        model: the cost of its units.
        training: everything else, such as the world size.
        hardware: the machine.

    Returns:
        Its simulation.
    """

    def missing(one: Training) -> int:
        short = memory_needs(model, one, hardware).shortfalls(hardware)
        return sum(tier.needed - tier.available for tier in short)

    return simulate(model, min(_candidates(training), key=missing), hardware)


def _candidates(training: Training) -> Iterator[Training]:
    for stage, params, grads, optimizer, activations in product(range(4), TIERS, TIERS, TIERS, ACTIVATIONS):
        tiers = {"params": params, "grads": grads, "optimizer": optimizer}
        if any(tier != "device" and stage < FIRST_STAGE[kind] for kind, tier in tiers.items()):
            continue
        if training.update_mode == "delayed" and optimizer == "device":
            continue
        yield replace(training, stage=stage, activations=activations, **tiers)  # type: ignore[arg-type]


def _distance(one: Simulation) -> tuple[int, int, int]:
    training = one.training
    tiers = sum(TIERS.index(getattr(training, kind)) for kind in FIRST_STAGE)
    return tiers, ACTIVATIONS.index(training.activations), training.stage
