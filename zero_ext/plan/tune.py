"""The fastest of many configurations of a training script by short measured trials of few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import ConfigError
from zero_ext.config.tiers import is_stored
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.plan_entry import CANDIDATES, Candidate
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.simulate import estimate_step
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Training
from zero_ext.plan.trial import TrialOutcome

CLOSE = 0.85  # of the best rate: slower placements are not tried any further
HOPELESS = 0.4  # of the best prediction: not tried
FINALISTS, FINAL_RUNS = 3, 2  # the fastest so many are tried so many times more, in turn
EQUAL = 0.9  # of the best rate: slower ones are no finalists

AioSection = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Point:
    """One configuration of a :class:`Space`.

    ``unit_elements`` are ``units.prefetch_elements`` in stage 3, else ``units.bucket_elements``. ``aio`` are
    keys and values of that section; empty where nothing is on NVMe.
    """

    placement: Candidate
    micro_batch: int
    unit_elements: int
    aio: AioSection = ()

    def __str__(self) -> str:
        what = "prefetch" if self.placement.stage == 3 else "buckets"
        words = [str(self.placement), f"micro-batch {self.micro_batch}", f"{what} {self.unit_elements:,}"]
        return ", ".join([*words, *(f"{name} {value}" for name, value in self.aio)])


@dataclass(frozen=True)
class Space:
    """A grid of configurations by the values of every axis, in rising order where they are numbers.

    Attributes:
        placements: stages with their tiers.
        micro_batches: samples of a rank's forward.
        unit_elements: see :class:`Point`.
        aio: sections, for placements on NVMe only.
        base: every other key.
        ranks: that the script runs on.
    """

    placements: tuple[Candidate, ...]
    micro_batches: tuple[int, ...] = (1,)
    unit_elements: tuple[int, ...] = (16_777_216,)
    aio: tuple[AioSection, ...] = ((),)
    base: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    nvme_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("placements", "micro_batches", "unit_elements", "aio"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got none. Pass the values to try.")

    def variants(self, placement: Candidate, micro_batch: int) -> list[Point]:
        """Return the points of one placement and micro-batch."""
        sections = self.aio if is_stored(*placement.tiers.values()) else ((),)
        return [Point(placement, micro_batch, each, aio) for each in self.unit_elements for aio in sections]

    def __iter__(self) -> Iterator[Point]:
        for placement in self.placements:
            for micro_batch in self.micro_batches:
                yield from self.variants(placement, micro_batch)

    def config(self, point: Point) -> ZeroConfig:
        """Return the configuration of ``point``; for these ranks only if the base has a ``train_batch_size``.

        Raises ConfigError where the base's batch is no multiple of its micro-batch, or the base does not fit
        its placement.
        """

        def section(name: str, **changes: object) -> dict[str, Any]:
            return {**self.base.get(name, {}), **changes}

        offload = section("offload", **point.placement.tiers)
        offload.pop("nvme_paths", None)
        if is_stored(*point.placement.tiers.values()):
            offload["nvme_paths"] = list(self.nvme_paths)
        batch = section("batch", micro_batch_size=point.micro_batch)
        if "train_batch_size" in batch:
            batch.pop("gradient_accumulation_steps", None)
        units = "prefetch_elements" if point.placement.stage == 3 else "bucket_elements"
        values = {
            **self.base,
            "stage": point.placement.stage,
            "offload": offload,
            "batch": batch,
            "units": section("units", **{units: point.unit_elements}),
        }
        if point.aio:
            values["aio"] = section("aio", **dict(point.aio))
        config = ZeroConfig.from_mapping(values)
        resolved = config.batch.resolve(self.ranks)
        return config.replace(batch=resolved) if "train_batch_size" in batch else config


def placements_of(stages: tuple[int, ...], tiers: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Return the candidates of these stages with state in these tiers only. ValueError if there are none."""
    found = tuple(
        candidate
        for candidate in CANDIDATES
        if candidate.stage in stages
        and {*candidate.tiers.values()} <= {*tiers, "device"}
        and (candidate.distance or "device" in tiers)
    )
    if not found:
        raise ValueError(
            f"--stages: no placement of the stages {stages} has all its state in the --tiers {tiers}. Allow "
            "more stages or more tiers."
        )
    return found


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction for a point; ``recomputed``: the script recomputes activations."""

    model: ModelSpec
    hardware: Hardware
    ranks: int
    recomputed: bool = False

    def why_not(self, config: ZeroConfig) -> str:
        """Return what does not fit, in words; empty if all does."""
        needs = memory_needs(self.model.full_cost, self._training(config), self.hardware)
        return "; ".join(map(str, needs.shortfalls(self.hardware)))

    def samples_per_second(self, config: ZeroConfig) -> float:
        """Of all ranks."""
        training = self._training(config)
        return training.samples / estimate_step(self.model.full_cost, training, self.hardware).seconds

    def _training(self, config: ZeroConfig) -> Training:
        return Training.of_config(config, self.ranks, ACTIVATIONS[self.recomputed])


@dataclass(frozen=True)
class TrialResult:
    """A point and what became of it; ``tried`` is False where no process was started for it."""

    point: Point
    outcome: TrialOutcome
    tried: bool = True


@dataclass
class Tuning:
    """All that was found out about a space: the runs in their order, of the fastest points more than one."""

    space: Space
    measured: list[TrialResult] = field(default_factory=list)

    @property
    def fastest(self) -> list[TrialResult]:
        """The runs that were measured, the fastest first."""
        found = [one for one in self.measured if one.outcome.fate == "measured"]
        return sorted(found, key=lambda one: -one.outcome.samples_per_second)

    @property
    def best(self) -> TrialResult | None:
        """The fastest run, as other work of a machine makes runs slower and none faster; None if none ran."""
        return next(iter(self.fastest), None)

    @property
    def trials(self) -> int:
        """Processes that were started."""
        return sum(one.tried for one in self.measured)


def search(
    space: Space,
    measure: Callable[[ZeroConfig], TrialOutcome],
    prediction: Prediction | None = None,
    *,
    most_trials: int | None = None,
    tick: Callable[[TrialResult], None] = lambda one: None,
) -> Tuning:
    """Find the fastest point of ``space`` by ``measure``, in rounds that fewer and fewer points go on from.

    Every placement is tried with its largest micro-batch that runs; those within 15% of the best with every
    size of units and every I/O section, or, after the first with the same meaning of units, with its fastest
    ones; the fastest with smaller micro-batches, as long as those are faster: about a third of 24 points.
    The fastest three within 10% of the best run twice more in turn, as one run does not separate them. A
    ``prediction`` puts the most promising placements first, and leaves out what would not fit and what would
    reach less than 40% of the best prediction. ``tick`` is called with every run. At most ``most_trials``
    are made.
    """
    one = _Search(Tuning(space), measure, prediction, most_trials, tick)
    for placement in one.ranked:
        one.try_largest(placement)
    running = one.tuning.fastest
    for each in running:
        if each.outcome.samples_per_second >= CLOSE * running[0].outcome.samples_per_second:
            one.try_variants(each.point)
    if one.tuning.best is not None:
        one.try_smaller(one.tuning.best.point)
    one.try_again()
    return one.tuning


class _Search:
    def __init__(
        self,
        tuning: Tuning,
        measure: Callable[[ZeroConfig], TrialOutcome],
        prediction: Prediction | None,
        most_trials: int | None,
        tick: Callable[[TrialResult], None],
    ) -> None:
        self.tuning, self._space, self._measure = tuning, tuning.space, measure
        self._most, self._tick = most_trials, tick
        self._rates: dict[Point, float] = {}
        self._left_out: dict[Point, str] = {}
        self._fastest_variant: dict[tuple[bool, bool], Point] = {}
        expected: dict[Point, float] = {}
        for point in self._space:
            try:
                config = self._space.config(point)
            except ConfigError as error:
                self._left_out[point] = str(error).splitlines()[-1].strip()
                continue
            if prediction is not None and (lacking := prediction.why_not(config)):
                self._left_out[point] = f"the planner says that it does not fit: {lacking}"
            elif prediction is not None:
                expected[point] = prediction.samples_per_second(config)
        best = max(expected.values(), default=0.0)
        promise = dict.fromkeys(self._space.placements, 0.0)
        for point, rate in expected.items():
            if rate < HOPELESS * best:
                self._left_out[point] = f"the planner expects {rate / best:.0%} of the best"
            promise[point.placement] = max(promise[point.placement], rate)
        self.ranked = sorted(promise, key=lambda placement: -promise[placement])

    def try_largest(self, placement: Candidate) -> None:
        """Try the largest micro-batch, and smaller ones until one runs."""
        for micro_batch in self._space.micro_batches[::-1]:
            if self.rate(self._space.variants(placement, micro_batch)[0]):
                break

    def try_variants(self, point: Point) -> None:
        """Try the sizes of units and the I/O sections: of the first of a kind all, then its fastest."""
        kind = (point.placement.stage == 3, bool(point.aio))
        if known := self._fastest_variant.get(kind):
            self.rate(replace(point, unit_elements=known.unit_elements, aio=known.aio))
        else:
            variants = self._space.variants(point.placement, point.micro_batch)
            self._fastest_variant[kind] = max(variants, key=self.rate)

    def try_smaller(self, point: Point) -> None:
        """Try smaller micro-batches, as long as each is faster than the one before."""
        for micro_batch in self._space.micro_batches[::-1]:
            if micro_batch < point.micro_batch:
                below = replace(point, micro_batch=micro_batch)
                if self.rate(below) <= self._rates[point]:
                    break
                point = below

    def try_again(self) -> None:
        """Try the fastest once more, in turn."""
        fastest = self.tuning.fastest[:FINALISTS]
        enough = EQUAL * max((one.outcome.samples_per_second for one in fastest), default=0.0)
        finalists = [one.point for one in fastest if one.outcome.samples_per_second >= enough]
        for _ in range(FINAL_RUNS if len(finalists) > 1 else 0):
            for point in finalists:
                self._try(point)

    def rate(self, point: Point) -> float:
        """Return samples per second of ``point``, tried if it is worth it; 0 if there are none."""
        if point in self._left_out and point not in self._rates:
            self._note(point, TrialOutcome("failed", reason=self._left_out[point]), tried=False)
        elif point not in self._rates:
            self._try(point)
        return self._rates.get(point, 0.0)

    def _try(self, point: Point) -> None:
        if self._most is None or self.tuning.trials < self._most:
            self._note(point, self._measure(self._space.config(point)), tried=True)

    def _note(self, point: Point, outcome: TrialOutcome, tried: bool) -> None:
        self._rates[point] = outcome.samples_per_second
        self.tuning.measured.append(TrialResult(point, outcome, tried))
        self._tick(self.tuning.measured[-1])
