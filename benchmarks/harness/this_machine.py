"""The machine of `benchmarks/results` for the cost model, and its measured steps beside the model's."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.report import RESULTS
from benchmarks.harness.shapes import SEQUENCE_LENGTH, LlamaShape, shape_named
from zero_ext.plan.simulation import (
    Hardware,
    ModelCost,
    Simulation,
    Training,
    Transformer,
    calibrated,
    simulate,
)

THREADS = 2
MEMORY_BYTES = 25_200_000_000
NVME_BYTES = 10**12
FREE = 1e15  # bytes/s of what costs nothing here: copies that are not made, links to other nodes
SECONDS = (1e-6, 1.0)  # between which a fitted time is searched
FLOPS = (1e9, 1e13)
TURNS = 12  # of two fits in turn; the last ones change nothing
ADAM_BYTES = 12  # of an element's state


@dataclass(frozen=True)
class Row:
    """A measured step and its simulation; ``fitted`` says that a figure of the machine was chosen by it."""

    what: str
    source: str
    measured: float
    simulation: Simulation
    fitted: bool = False

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulation.seconds / self.measured - 1


def cost_of(name: str) -> ModelCost:
    """A Llama of the benchmarks, in the cost model's words."""
    shape = shape_named(name)
    if not isinstance(shape, LlamaShape):
        raise ValueError(f"{name!r} is no Llama")
    return Transformer(
        name,
        shape.hidden,
        shape.layers,
        shape.heads,
        shape.vocabulary,
        SEQUENCE_LENGTH,
        shape.feed_forward,
        gated=True,
        tied=False,
        fused_attention=True,
    ).cost()


def training_of(ranks: int, stage: int, **options: Any) -> Training:
    """What the step benchmarks run."""
    return Training(ranks, stage, activations="saved", **options)


class ThisMachine:
    """Descriptions for one rank of two threads (``alone``) and two ranks of one thread (``pair``).

    Four figures are fitted to four measured steps: the rate of products and what a unit takes besides, to one
    rank's steps of both models; what a unit takes with one thread and what a collective takes besides, to two
    ranks' steps of the 34M model in stages 1 and 3. Memory, NVMe reads and NVMe writes are those of the adam,
    inference and overlap results.
    """

    def __init__(self, results: Path = RESULTS) -> None:
        self._results = results
        alone = self._described(1, 1e11)
        for _ in range(TURNS):
            alone = self._fitted(alone, "matmul_flops", "239m", "stage3@1", training_of(1, 3))
            alone = self._fitted(alone, "unit_seconds", "34m", "stage3@1", training_of(1, 3))
        self.alone = alone
        pair = self._described(2, alone.matmul_flops / THREADS)
        for _ in range(TURNS):
            pair = self._fitted(pair, "unit_seconds", "34m", "stage1", training_of(2, 1))
            pair = self._fitted(pair, "collective_seconds", "34m", "stage3", training_of(2, 3))
        self.pair = pair

    def rows(self) -> list[Row]:
        """The fitted rows, then those that nothing was fitted to."""
        one, stored = training_of(1, 3), {"grads": "host", "optimizer": "nvme"}
        everything: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "update_mode": "in_backward"}
        huge = training_of(1, 3, clipping=False, moments_dtype="8bit", **everything)
        huge_seconds = self._load("huge")["measured"]["step_seconds"]
        found = [self._step(name, "stage3@1", one, True) for name in ("34m", "239m")]
        found += [self._step("34m", f"stage{stage}", training_of(2, stage), True) for stage in (1, 3)]
        found += [self._step("34m", f"stage{stage}", training_of(2, stage)) for stage in (0, 2)]
        found += [self._step("239m", f"stage{stage}", training_of(2, stage)) for stage in (1, 2, 3)]
        found += [
            self._row(
                "239m", key, "offload", self._seconds("offload", "239m", key), training_of(2, 3, **options)
            )
            for key, options in (("stage3-nvme", stored), ("stage3-stored", {**stored, "params": "nvme"}))
        ]
        return [*found, self._row("7b", "huge@1", "huge", huge_seconds, huge)]

    def _fitted(
        self, hardware: Hardware, key: str, name: str, contender: str, training: Training
    ) -> Hardware:
        bounds = FLOPS if key == "matmul_flops" else SECONDS
        seconds = self._seconds(f"step-{name}", name, contender)
        return calibrated(hardware, key, bounds, cost_of(name), training, seconds)

    def _step(self, name: str, contender: str, training: Training, fitted: bool = False) -> Row:
        source = f"step-{name}"
        return self._row(name, contender, source, self._seconds(source, name, contender), training, fitted)

    def _row(
        self, name: str, contender: str, source: str, seconds: float, training: Training, fitted: bool = False
    ) -> Row:
        hardware = self.alone if training.world_size == 1 else self.pair
        return Row(
            f"{name} {contender}", source, seconds, simulate(cost_of(name), training, hardware), fitted
        )

    def _described(self, ranks: int, flops: float) -> Hardware:
        adam = next(one for one in self._load("adam")["results"] if one["name"] == "zero_ext")
        moved = adam["bytes"] / adam["seconds"]
        reading = self._load("inference")["results"][0]
        read = reading["parameter_bytes"] / median(reading["read"])
        return Hardware(
            name=f"this machine, {ranks} rank{'s' if ranks > 1 else ''}",
            ranks_per_node=ranks,
            matmul_flops=flops,
            matmul_efficiency=1.0,
            device_bytes=MEMORY_BYTES,
            device_bandwidth=moved / ranks,
            host_bytes=MEMORY_BYTES,
            host_bandwidth=moved,
            to_host=FREE,
            to_device=FREE,
            node_to_host=FREE,
            node_to_device=FREE,
            nvme_bytes=NVME_BYTES,
            nvme_read=read,
            nvme_write=self._write_rate(read),
            nvme_half_duplex=True,
            intra_bandwidth=moved / ranks / 2,  # a byte received is a byte read and a byte written
            inter_bandwidth=FREE,
            device_is_host=True,
        )

    def _write_rate(self, read: float) -> float:
        """What is left for writes when as many bytes are read and written back in the time of `overlap`."""
        overlap = self._load("overlap")
        words = overlap["environment"]["command"].split()
        elements = int(words[words.index("--elements") + 1]) if "--elements" in words else 64_000_000
        nbytes = ADAM_BYTES * elements
        return nbytes / (median(overlap["seconds"]["transfer"]) - nbytes / read)

    def _seconds(self, name: str, model: str, key: str) -> float:
        """Of all turns that a contender had."""
        runs = [run for run in self._load(name)["runs"] if run["model"] == model and key in run["records"]]
        return median(seconds for run in runs for seconds in run["records"][key]["seconds"])

    def _load(self, name: str) -> dict[str, Any]:
        return json.loads((self._results / f"{name}.json").read_text())
