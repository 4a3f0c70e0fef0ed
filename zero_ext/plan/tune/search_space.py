"""The configurations that tuning chooses from: a grid over placements, micro-batches, units and I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zero_ext.config import ZeroConfig
from zero_ext.plan.placement_candidates import CANDIDATES, Candidate


@dataclass(frozen=True)
class Point:
    """One configuration of a :class:`Space`.

    ``unit_elements`` are ``units.prefetch_elements`` in stage 3, else ``units.bucket_elements``. ``aio`` are
    keys and values of that section; empty where nothing is on NVMe.
    """

    placement: Candidate
    micro_batch: int
    unit_elements: int
    aio: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        what = "prefetch" if self.placement.stage == 3 else "buckets"
        words = [str(self.placement), f"micro-batch {self.micro_batch}", f"{what} {self.unit_elements:,}"]
        words += [f"{name} {value}" for name, value in self.aio]
        return ", ".join(words)

    @property
    def stored(self) -> bool:
        """Return whether anything is on NVMe."""
        return "nvme" in self.placement.options.values()


@dataclass(frozen=True)
class Space:
    """The values of every axis, in rising order where they are numbers.

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
    aio: tuple[tuple[tuple[str, int | str], ...], ...] = ((),)
    base: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    nvme_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("placements", "micro_batches", "unit_elements", "aio"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got none. Pass the values to try.")

    def variants(self, placement: Candidate, micro_batch: int) -> Iterator[Point]:
        """Yield the points of one placement and micro-batch."""
        sections = self.aio if "nvme" in placement.options.values() else ((),)
        for elements in self.unit_elements:
            for aio in sections:
                yield Point(placement, micro_batch, elements, aio)

    def __iter__(self) -> Iterator[Point]:
        for placement in self.placements:
            for micro_batch in self.micro_batches:
                yield from self.variants(placement, micro_batch)

    def config(self, point: Point) -> ZeroConfig:
        """Return the configuration of ``point``; for these ranks only if the base has a ``train_batch_size``.

        Raises ConfigError where the base's batch is no multiple of its micro-batch, or the base does not fit
        its placement.
        """
        values = {**self.base, "stage": point.placement.stage}
        tiers = {name: value for name, value in point.placement.options.items() if name != "stage"}
        offload = {**self.base.get("offload", {}), **tiers}
        offload.pop("nvme_paths", None)
        if point.stored:
            offload["nvme_paths"] = list(self.nvme_paths)
        batch = {**self.base.get("batch", {}), "micro_batch_size": point.micro_batch}
        if "train_batch_size" in batch:
            batch.pop("gradient_accumulation_steps", None)
        key = "prefetch_elements" if point.placement.stage == 3 else "bucket_elements"
        values |= {
            "offload": offload,
            "batch": batch,
            "units": {**self.base.get("units", {}), key: point.unit_elements},
        }
        if point.aio:
            values["aio"] = {**self.base.get("aio", {}), **dict(point.aio)}
        config = ZeroConfig.from_mapping(values)
        resolved = config.batch.resolve(self.ranks)
        return config.replace(batch=resolved) if "train_batch_size" in batch else config


def placements_of(stages: tuple[int, ...], tiers: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Return the candidates of these stages with state in these tiers only. ValueError if there are
    none.
    """
    found = tuple(
        candidate
        for candidate in CANDIDATES
        if candidate.stage in stages
        and {candidate.params, candidate.grads, candidate.optimizer} <= {*tiers, "device"}
        and (candidate.distance or "device" in tiers)
    )
    if not found:
        raise ValueError(
            f"--stages: no placement of the stages {stages} has all its state in the --tiers {tiers}. Allow "
            "more stages or more tiers."
        )
    return found
