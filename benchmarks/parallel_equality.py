"""Losses of every layout of pipeline stages, replicas and slices of tensors, in every ZeRO stage, against one
process on the same batches.

Run from the repository root: python -m benchmarks.parallel_equality [--steps 20] [--most-ranks 8]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import Annotated

import torch
import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import REPOSITORY, Team
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import largest_difference
from examples.demo_3d.settings import ThreeDSettings
from examples.demo_3d.steps import OneProcess, Step, batches, text_of

BAR = 1e-5
LENGTHS = (1, 2, 4)
RANKS_OF_ALL_LAYOUTS = 4
CUBE = (2, 2, 2)
STEPS_OF_CUBE = 10
STAGES = (0, 1, 2, 3)
TEXT = REPOSITORY / "LICENSE"
# With a smaller epsilon Adam's first steps are signs, and of a gradient near zero the sign is rounding.
MODEL = ThreeDSettings(
    width=32, blocks=2, window=16, learning_rate=1e-2, epsilon=1e-3, clipping=0.5, steps=20
)


@dataclass(frozen=True)
class Layout:
    """How many pipeline stages, replicas and slices of tensors."""

    pp: int
    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        """Those that all axes take together."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Course:
    """A layout in a ZeRO stage: every step, and by how much any of its losses and of its gradients' norms is
    away from one process, as a part of it."""

    layout: Layout
    stage: int
    steps: list[Step]
    loss_difference: float
    norm_difference: float


def layouts(most_ranks: int) -> list[Layout]:
    """By their number of ranks."""
    every = [Layout(*lengths) for lengths in product(LENGTHS, repeat=3)]
    selected = [each for each in every if each.ranks <= RANKS_OF_ALL_LAYOUTS] + [Layout(*CUBE)]
    return sorted((each for each in selected if each.ranks <= most_ranks), key=lambda each: each.ranks)


def steps_of_one_process(settings: ThreeDSettings) -> list[Step]:
    """The same steps without zero_ext."""
    torch.set_num_threads(1)
    alone = OneProcess(settings)
    return [alone.step(*batch) for batch in batches(settings, text_of(TEXT))]


def train(chosen: list[Layout], settings: ThreeDSettings, alone: list[Step]) -> Iterator[Course]:
    """Every layout in every stage; those with the same number of ranks in the same processes."""
    for ranks, same in groupby(chosen, key=lambda each: each.ranks):
        with Team(f"{ranks} ranks", ranks, 1, worker="benchmarks.harness.layout_rank") as team:
            team.ask("start")
            for layout, stage in product(same, STAGES):
                steps = min(settings.steps, STEPS_OF_CUBE) if ranks > RANKS_OF_ALL_LAYOUTS else settings.steps
                settings_of_run = asdict(replace(settings, steps=steps))
                answers = team.ask(
                    "train", settings=settings_of_run, text=str(TEXT), axes=asdict(layout), stage=stage
                )
                steps_by_rank = [[Step(*step) for step in answer] for answer in answers]
                yield Course(layout, stage, steps_by_rank[0], *differences(steps_by_rank, alone))


def differences(steps_by_rank: Sequence[list[Step]], alone: list[Step]) -> list[float]:
    """The largest relative ones of losses and of norms, on any rank."""
    found = [step for steps in steps_by_rank for step in steps]
    wanted = [step for steps in steps_by_rank for step in alone[: len(steps)]]
    columns = zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True)
    return [largest_difference(own, its) for own, its in columns]


def table_of(courses: list[Course], alone: list[Step]) -> Table:
    """A row for each layout, a column for each stage."""
    table = Table(
        "Greatest relative difference of a step's loss to one process",
        (
            *("layout", "ranks", "steps", *(f"ZeRO-{stage}" for stage in STAGES)),
            *(f"at most {BAR:g}", "norms, any stage"),
        ),
        note=f"fp32 with clipping; the loss falls from {alone[0].loss:.3f} to {alone[-1].loss:.3f}. The "
        "one process is a plain loop of PyTorch on the same global batches. Norms: those of the gradient, "
        f"before clipping to {MODEL.clipping:g}, differ by at most so much.",
    )
    for layout, of_layout in groupby(courses, key=lambda each: each.layout):
        found = list(of_layout)
        met = "yes" if all(each.loss_difference <= BAR for each in found) else "NO"
        name = f"pp {layout.pp} × dp {layout.dp} × tp {layout.tp}"
        counts = (str(layout.ranks), str(len(found[0].steps)))
        norms = max(each.norm_difference for each in found)
        figures = [f"{each.loss_difference:.1e}" for each in found]
        table.rows.append([name, *counts, *figures, met, f"{norms:.1e}"])
    return table


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of a layout; at most 10 on 8 ranks.")] = 20,
    most_ranks: Annotated[int, typer.Option(min=1, help="Layouts of more ranks are left out.")] = 8,
) -> None:
    """Train, compare, print, write."""
    console = terminal()
    settings = replace(MODEL, steps=steps)
    alone = steps_of_one_process(settings)
    courses = []
    for course in train(layouts(most_ranks), settings, alone):
        console.print(f"{course.layout}, stage {course.stage}: {course.loss_difference:.1e}")
        courses.append(course)
    broken = [
        f"{each.layout}, stage {each.stage}: {each.loss_difference:.2e}, bar {BAR:g}"
        for each in courses
        if not each.loss_difference <= BAR
    ]
    data = {
        "environment": describe(),
        "settings": asdict(settings),
        "one_process": alone,
        "results": [asdict(each) for each in courses],
    }
    conclude(console, "parallel_equality", "Layouts of ranks", [table_of(courses, alone)], data, broken)


if __name__ == "__main__":
    typer.run(main)
