"""For a model that fits nowhere: what it lacks, and the nearest that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.parse_sizes import COUNTS, short_number
from zero_ext.plan.placement_candidates import CANDIDATES
from zero_ext.plan.planner import Plan
from zero_ext.plan.simulation.run_memory import fits
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Training

MOST_GPUS = 1 << 16
_HALVINGS = 12


def why_nothing_fits(plan: Plan) -> str:
    """Return what the nearest placement lacks, how many GPUs would do, and how large a model would fit."""
    row = plan.nearest
    lacks = "; ".join(map(str, row.shortfalls))
    found = [f"{plan.model.name} fits no placement on {plan.gpus} GPUs of {plan.hardware.name}."]
    found.append(f"The nearest, {row.candidate} with micro-batch {row.training.micro_batch}, lacks {lacks}.")
    gpus = fewest_gpus(plan)
    if gpus is not None:
        found.append(f"It would fit {gpus} GPUs of this kind.")
    else:
        found.append(f"It would not fit {MOST_GPUS} GPUs of this kind either.")
    largest = largest_model(plan)
    if largest is not None:
        found.append(f"The largest GPT that fits {plan.gpus} has about {largest.name} parameters.")
    return " ".join(found)


def fewest_gpus(plan: Plan) -> int | None:
    """Of whole hosts, the fewest on which anything fits, to a sixteenth; one sample a GPU at a time. None
    beyond :data:`MOST_GPUS`."""
    host = plan.hardware.ranks_per_node
    least, gpus = plan.gpus, max(host, -(-2 * plan.gpus // host) * host)
    while not _fits(plan, plan.model, gpus):
        least, gpus = gpus, 2 * gpus
        if gpus > MOST_GPUS:
            return None
    while gpus - least > max(host, gpus // 16):
        middle = -(-(least + gpus) // 2 // host) * host
        if middle in (least, gpus):
            break
        least, gpus = (least, middle) if _fits(plan, plan.model, middle) else (middle, gpus)
    return gpus


def largest_model(plan: Plan) -> ModelSpec | None:
    """Return the largest number of parameters, as a GPT, with which one sample per GPU fits; None if that is
    none.
    """
    low, high = 1_000_000, plan.model.parameters
    fitting = None
    for _ in range(_HALVINGS):
        middle = round((low * high) ** 0.5)
        model = model_named(_two_digits(middle)).with_sequence(plan.model.shape.sequence)
        if _fits(plan, model, plan.gpus):
            fitting, low = model, middle
        else:
            high = middle
    return fitting


def _fits(plan: Plan, model: ModelSpec, gpus: int) -> bool:
    base = Training(gpus, moments_dtype=plan.entries[0].training.moments_dtype)
    trainings = (
        replace(base, **candidate.options, activations=activations)
        for candidate, activations in product(CANDIDATES, ACTIVATIONS)
    )
    return any(fits(model.full_cost, training, plan.hardware) for training in trainings)


def _two_digits(count: int) -> str:
    return short_number(float(f"{count:.1e}"), tuple(COUNTS)).replace(" ", "")
