"""One unknown figure of a machine, from one measured step."""

from __future__ import annotations

import math

from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.simulate import simulate
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.simulation.transformer_cost import ModelCost

_HALVINGS = 60


def calibrated(
    hardware: Hardware,
    key: str,
    bounds: tuple[float, float],
    model: ModelCost,
    training: Training,
    seconds: float,
) -> Hardware:
    """Return `hardware` with one figure such that a simulated step takes a measured time.

    Args:
        hardware: the machine.
        key: the figure.
        bounds: positive numbers between which it is searched.
        model: as measured.
        training: as measured.
        seconds: of the measured step.

    Returns:
        The machine with the figure.

    Raises:
        ValueError: no value between the bounds gives that time; names the times at both ends.
    """
    low, high = bounds
    if not 0 < low < high:
        raise ValueError(
            f"bounds: expected two positive numbers in rising order, got {bounds}. Pass the lower bound "
            "first."
        )

    def simulated_seconds(value: float) -> float:
        return simulate(model, training, hardware.replace(**{key: value})).seconds

    at_low, at_high = simulated_seconds(low), simulated_seconds(high)
    if not min(at_low, at_high) <= seconds <= max(at_low, at_high):
        raise ValueError(
            f"{key}: no value between {low:g} and {high:g} makes a step take {seconds:.4g} s. At these "
            f"bounds it takes {at_low:.4g} and {at_high:.4g} s. Widen the bounds, or correct the other "
            "keys of the machine."
        )
    rising = at_high > at_low
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if (simulated_seconds(middle) < seconds) == rising:
            low = middle
        else:
            high = middle
    return hardware.replace(**{key: math.sqrt(low * high)})
