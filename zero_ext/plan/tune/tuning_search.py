"""The search over points: far fewer than all are tried, and the best is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import ConfigError
from zero_ext.plan.placement_candidates import Candidate
from zero_ext.plan.tune.analytic_pruning import Prediction
from zero_ext.plan.tune.search_space import Point, Space
from zero_ext.plan.tune.trial_process import TrialOutcome

CLOSE = 0.85  # of the best rate: such placements are tried with every unit size and I/O section too
WORSE = 0.9  # of a smaller micro-batch's rate: larger ones are not tried
HOPELESS = 0.4  # of the best prediction: not tried
FINALISTS, FINAL_RUNS = 3, 2  # the fastest so many are tried so many times more, in turn
EQUAL = 0.9  # of the best rate: slower ones are no finalists


@dataclass(frozen=True)
class TrialResult:
    """A point and what became of it; ``tried`` is False where no process was started for it."""

    point: Point
    outcome: TrialOutcome
    tried: bool = True


@dataclass
class Tuning:
    """All that was found out about a space.

    Attributes:
        measured: in the order in which it happened; the fastest points more than once.
    """

    space: Space
    measured: list[TrialResult] = field(default_factory=list)

    @property
    def best(self) -> TrialResult | None:
        """The fastest run; None if nothing could be measured. What else a machine does makes runs slower and
        none faster."""
        found = [one for one in self.measured if one.outcome.fate == "measured"]
        return max(found, key=lambda one: one.outcome.samples_per_second, default=None)

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
    """Find the fastest point of ``space`` by ``measure``.

    Every placement is tried with rising micro-batches until one runs out of memory or is slower than the one
    before; then those within 15% of the best with every size of units and every I/O section; then the fastest
    three within 10% of the best twice more in turn, as one run does not separate them. A ``prediction``
    leaves out what would not fit, and what would reach less than 40% of the best prediction. ``tick`` is
    called with every run. At most ``most_trials`` are made, those of the most promising placements first.
    """
    return _Search(Tuning(space), measure, prediction, most_trials, tick).run()


class _Search:
    def __init__(
        self,
        tuning: Tuning,
        measure: Callable[[ZeroConfig], TrialOutcome],
        prediction: Prediction | None,
        most_trials: int | None,
        tick: Callable[[TrialResult], None],
    ) -> None:
        self._tuning = tuning
        self._space = tuning.space
        self._measure = measure
        self._prediction = prediction
        self._most = most_trials
        self._tick = tick
        self._known: dict[Point, TrialOutcome] = {}
        self._expected: dict[Point, float] = {}

    def run(self) -> Tuning:
        for placement in self._in_order():
            self._rising_micro_batches(placement)
        best = self._tuning.best
        if best is not None:
            enough = CLOSE * best.outcome.samples_per_second
            finalists = [one for one in self._tuning.measured if one.outcome.samples_per_second >= enough]
            finalists.sort(key=lambda one: -one.outcome.samples_per_second)
            for one in finalists:
                for point in self._space.variants(one.point.placement, one.point.micro_batch):
                    self._rate(point)
        self._final()
        return self._tuning

    def _final(self) -> None:
        best = self._tuning.best
        if best is None:
            return
        fastest = sorted(
            (one for one in self._tuning.measured if one.outcome.fate == "measured"),
            key=lambda one: -one.outcome.samples_per_second,
        )
        enough = EQUAL * best.outcome.samples_per_second
        finalists = [one.point for one in fastest[:FINALISTS] if one.outcome.samples_per_second >= enough]
        for _ in range(FINAL_RUNS if len(finalists) > 1 else 0):
            for point in finalists:
                if self._allowed():
                    self._note(point, self._measure(self._space.config(point)), tried=True)

    def _in_order(self) -> list[Candidate]:
        """Placements, the most promising first; without a prediction as they were given."""
        if self._prediction is None:
            return list(self._space.placements)
        for point in self._space:
            try:
                config = self._space.config(point)
            except ConfigError:
                continue
            if not self._prediction.why_not(config):
                self._expected[point] = self._prediction.samples_per_second(config)

        def promise(placement: Candidate) -> float:
            return max(
                (rate for point, rate in self._expected.items() if point.placement == placement), default=0.0
            )

        return sorted(self._space.placements, key=promise, reverse=True)

    def _rising_micro_batches(self, placement: Candidate) -> None:
        best = 0.0
        for number, micro_batch in enumerate(self._space.micro_batches):
            point = next(self._space.variants(placement, micro_batch))
            rate = self._rate(point)
            outcome = self._known.get(point)
            if outcome is not None and outcome.fate == "out of memory":
                for larger in self._space.micro_batches[number + 1 :]:
                    reason = f"micro-batch {micro_batch} is too large already"
                    skipped = next(self._space.variants(placement, larger))
                    self._note(skipped, TrialOutcome("out of memory", reason=reason), tried=False)
                return
            if rate and rate < WORSE * best:
                return
            best = max(best, rate)

    def _rate(self, point: Point) -> float:
        """Return samples per second of ``point``, tried if it is worth it; 0 if there are none."""
        if point in self._known:
            return self._known[point].samples_per_second
        try:
            config = self._space.config(point)
        except ConfigError as error:
            self._note(point, TrialOutcome("failed", reason=str(error).splitlines()[-1].strip()), tried=False)
            return 0.0
        reason = self._why_not(point, config)
        if reason:
            self._note(point, TrialOutcome("failed", reason=reason), tried=False)
            return 0.0
        if not self._allowed():
            return 0.0
        self._note(point, self._measure(config), tried=True)
        return self._known[point].samples_per_second

    def _allowed(self) -> bool:
        return self._most is None or self._tuning.trials < self._most

    def _why_not(self, point: Point, config: ZeroConfig) -> str:
        if self._prediction is None:
            return ""
        lacking = self._prediction.why_not(config)
        if lacking:
            return f"the planner says that it does not fit: {lacking}"
        expected, best = self._expected[point], max(self._expected.values())
        if expected < HOPELESS * best:
            return f"the planner expects {expected / best:.0%} of the best"
        return ""

    def _note(self, point: Point, outcome: TrialOutcome, tried: bool) -> None:
        self._known[point] = outcome
        self._tuning.measured.append(TrialResult(point, outcome, tried))
        self._tick(self._tuning.measured[-1])
