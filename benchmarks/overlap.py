"""A step of optimizer state on NVMe against its bound: the slower of transfers alone and computing alone.

Run from the repository root: python -m benchmarks.overlap [--elements 64000000] [--rounds 7]
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from benchmarks.peers.base import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, nvme_folder
from zero_ext import ops
from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.offload import (
    AdamWork,
    MemoryShard,
    NvmeState,
    StateField,
    TierManager,
    Transfer,
    stream_adam,
)

BAR = 0.85
MOMENTS = ("exp_avg", "exp_avg_sq")


class Measured:
    """One range of `numel` elements three ways: streamed, transfers alone, computing alone."""

    def __init__(self, folder: str, numel: int, staging_buffer_bytes: int) -> None:
        policy = OffloadConfig(
            optimizer="nvme", nvme_paths=(folder,), staging_buffer_bytes=staging_buffer_bytes
        )
        kinds = {kind: StateField(torch.float32) for kind in MOMENTS}
        self.tiers = TierManager(policy, AioConfig(), {}, {"": kinds})
        self.numel = numel
        self.tiers.reserve(self.tiers.stored_state_bytes("nvme", numel))
        state = self.tiers.allocate_optimizer_state("nvme", numel, None)
        assert isinstance(state, NvmeState)
        self.state, stream = state, state.stream
        self.gradient = torch.randn(numel, dtype=torch.bfloat16)
        self.params = torch.zeros(numel, dtype=torch.bfloat16)
        self.in_memory = [torch.zeros(numel) for _ in range(3)]
        chunk = stream.chunk_bytes
        self.ring = ops.host_buffer(staging_buffer_bytes // chunk * chunk).view(-1, chunk)
        full, rest = divmod(numel, stream.chunk_elements)
        self.sizes = [chunk] * full + ([stream.extent_bytes(rest)] if rest else [])
        self.rows = [[LEARNING_RATE, *BETAS, EPSILON, WEIGHT_DECAY, 1.0, 1.0, 0.0]]
        self.scale = torch.ones(())

    def stream(self) -> None:
        """The step as the engine makes it."""
        transfers = self.tiers.transfers
        gradient = MemoryShard("host", self.gradient, transfers)
        output = MemoryShard("host", self.params, transfers)
        extent = self.state.extent(0, self.numel)
        stream_adam([AdamWork(extent, gradient, output, [(0, self.numel)], self.rows)], self.scale)

    def transfer(self) -> None:
        """Every chunk read and written back, as many under way as the ring holds, nothing computed."""
        reads: deque[tuple[int, Transfer]] = deque()
        writes: deque[Transfer] = deque()
        starts = [self.state.offset + sum(self.sizes[:number]) for number in range(len(self.sizes))]
        slots, store = len(self.ring), self.tiers.store
        for number, size in enumerate(self.sizes):
            if len(reads) == slots // 2:
                self._turn(reads, writes, starts)
            while len(writes) >= slots // 2:  # so the slot's own last write has ended
                writes.popleft().wait()
            slot = self.ring[number % slots]
            reads.append((number, store.read(starts[number], slot[:size])))
        while reads:
            self._turn(reads, writes, starts)
        while writes:
            writes.popleft().wait()

    def _turn(self, reads: deque[Any], writes: deque[Transfer], starts: list[int]) -> None:
        number, transfer = reads.popleft()
        transfer.wait()
        slot = self.ring[number % len(self.ring)][: self.sizes[number]]
        writes.append(self.tiers.store.write(starts[number], slot))

    def compute(self) -> None:
        """The same Adam on state in memory."""
        master, exp_avg, exp_avg_sq = self.in_memory
        segments = torch.tensor([[0, self.numel]], dtype=torch.int64)
        hyper = torch.tensor(self.rows, dtype=torch.float64)
        ops.adam_step_(master, exp_avg, exp_avg_sq, self.gradient, self.params, segments, hyper, self.scale)


def seconds_of(action: Callable[[], None]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def run(measured: Measured, rounds: int) -> dict[str, list[float]]:
    """The three in turn, after one unmeasured turn."""
    actions = {"stream": measured.stream, "transfer": measured.transfer, "compute": measured.compute}
    for action in actions.values():
        action()
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        for name in list(actions) if number % 2 == 0 else reversed(actions):
            found[name].append(seconds_of(actions[name]))
    return found


def main(
    elements: Annotated[int, typer.Option(min=1_000_000, help="Elements of the range.")] = 64_000_000,
    ring_mib: Annotated[int, typer.Option(min=1, help="Ring in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, the three in turn in each.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
) -> None:
    """Measure how much of the bound a step reaches; write the result."""
    console = terminal()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=nvme_folder()) as folder:
        measured = Measured(folder, elements, ring_mib << 20)
        times = run(measured, rounds)
        left = list(Path(folder).iterdir())
        del measured
    bounds = [max(pair) for pair in zip(times["transfer"], times["compute"], strict=True)]
    ratio = ratio_of_rounds(bounds, times["stream"])
    table = Table(
        "A step against its bound",
        (
            "elements",
            "step ms",
            "transfers alone ms",
            "computing alone ms",
            "bound / step",
            "95% interval",
            "bar",
            "met",
        ),
        note="Median of the rounds' ratios. Bound: the slower of reading and writing back every chunk with a"
        f" ring of {ring_mib} MiB, and Adam on the same elements in memory. {threads} threads.",
    )
    table.rows.append(
        [
            f"{elements:,}",
            *(f"{1e3 * median(times[name]):.0f}" for name in ("stream", "transfer", "compute")),
            f"{ratio.median:.3f}",
            ratio.interval(),
            f"≥ {BAR:.2f}",
            "yes" if ratio.at_least(BAR) else "NO",
        ]
    )
    environment = {**describe(), "NVMe folder": nvme_folder()}
    data = {"environment": environment, "seconds": times, "ratio": asdict(ratio), "bar": BAR}
    failures = ["the bar is missed"] if not ratio.at_least(BAR) or not left else []
    conclude(console, "overlap", "Overlap of transfers and computing", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
