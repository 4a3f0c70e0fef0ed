"""Whether a compressed way ends where its uncompressed one does, and the picture of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.compressed_modes import mode_named
from benchmarks.harness.convergence_run import Record


@dataclass(frozen=True)
class Verdict:
    """A mode over its seeds: mean held-out loss at the end, its ratio to the uncompressed one's, and the bar.

    `ratio` and `bar` are None for what is uncompressed itself, and where that has not run over the same
    seeds. Where either has run with several learning rates, the best of these counts, and the others have no
    bar. The bar is 1 plus the
    mode's tolerance, or plus the spread of the uncompressed way's seeds if that is more.
    """

    mode: str
    seeds: tuple[int, ...]
    held_out: float
    spread: float
    ratio: float | None
    bar: float | None

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None or self.bar is None else self.ratio <= self.bar


def judge(records: Sequence[Record]) -> list[Verdict]:
    """A verdict for every mode that has finished runs, in the order of the records."""
    ends: dict[str, dict[int, float]] = {}
    for record in records:
        if record.finished:
            ends.setdefault(record.mode, {})[record.seed] = record.held_out
    return [_verdict(mode, own, ends) for mode, own in ends.items()]


def _verdict(name: str, own: dict[int, float], ends: dict[str, dict[int, float]]) -> Verdict:
    mode = mode_named(name)
    mean = _mean(own)
    base = _best_rate(str(mode.against), own, ends)
    ratio = bar = None
    if base:
        ratio = mean / _mean(base)
        if own is _best_rate(name.partition("@")[0], own, ends):
            bar = 1 + max(mode.tolerance, _spread(base))
    return Verdict(name, tuple(sorted(own)), mean, _spread(own), ratio, bar)


def _best_rate(name: str, own: dict[int, float], ends: dict[str, dict[int, float]]) -> dict[int, float]:
    """The seeds' losses of a way with the learning rate that ends lowest, over the seeds of ``own``."""
    rates = [found for other, found in ends.items() if other.partition("@")[0] == name]
    return min((found for found in rates if found.keys() == own.keys()), key=_mean, default={})


def _mean(ends: dict[int, float]) -> float:
    return sum(ends.values()) / len(ends)


def _spread(ends: dict[int, float]) -> float:
    """Largest less smallest of the seeds' losses, as a part of their mean."""
    return (max(ends.values()) - min(ends.values())) * len(ends) / sum(ends.values())


def plot(records: Sequence[Record], title: str, path: Path) -> Path:
    """Held-out loss over steps, a line for each mode and seed, and how far each is from its uncompressed way
    at the same step and seed; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.0, 4.8))
    names = list(dict.fromkeys(record.mode for record in records))
    curves = {(record.mode, record.seed): dict(record.curve) for record in records}
    for number, name in enumerate(names):
        mode, color = mode_named(name), f"C{number}"
        for index, record in enumerate(each for each in records if each.mode == name):
            label = mode.title if index == 0 else None
            style = {"color": color, "linewidth": 1.0, "linestyle": ("-", "--", ":")[index % 3]}
            left.plot(*zip(*record.curve, strict=True), label=label, **style)
            base = curves.get((mode.against or "", record.seed), {})
            shared = [step for step, _ in record.curve if step in base]
            away = [100 * (curves[name, record.seed][step] / base[step] - 1) for step in shared]
            right.plot(shared, away, label=label, **style)
    left.set_ylabel("held-out loss, nats per byte")
    left.set_yscale("log")
    right.set_ylabel("held-out loss against the uncompressed way, %")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.axhline(1.0, color="black", linewidth=0.8, linestyle="dotted", label="1 %")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
