"""What the host does for a layer in forward and backward: hooks, gathers and reductions.

One process is rank 0 of eight whose collectives return at once, and tensors are so small that their
arithmetic hardly counts. Stage 3 in turn with FSDP2, which gathers again in backward as well, and with the
plain model, whose time is taken off both. Processor time of the thread, and what it calls, in Python and in
C, which other work on the machine does not change.

Each collective is one call of the group's backend on both sides: two gathers a layer, and for its gradients
a reduce-scatter of FSDP2's and an all-to-all of the engine's, which adds up what comes.

Run from the repository root: python -m benchmarks.host_time [--layers 48] [--rounds 15] [--passes 5]
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_ext
from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds

BAR = 0.9
RANKS, WIDTH, FEED_FORWARD, TOKENS = 8, 32, 64, 4


class Layer(nn.Module):
    """The parameters of a Llama layer, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        seen = self.before(hidden)
        hidden = hidden + self.out(self.query(seen) + self.key(seen) + self.value(seen))
        seen = self.between(hidden)
        return hidden + self.down(self.gate(seen) * self.up(seen))


class Layers(nn.Module):
    """A stack of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def contenders(layers: int) -> dict[str, Callable[[], None]]:
    """Forward and backward of the same model under each; the gradients go afterwards."""
    torch.manual_seed(0)
    plain = Layers(layers)
    sharded, other = copy.deepcopy(plain), copy.deepcopy(plain)
    model, optimizer = zero_ext.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=0.0), {"stage": 3})
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in other.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    inputs = torch.randn(TOKENS, WIDTH)

    def passes(module: nn.Module, clear: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            module(inputs).sum().backward()
            clear()

        return once

    return {
        "plain": passes(plain, plain.zero_grad),
        "zero_ext": passes(model, optimizer.zero_grad),
        "fsdp2": passes(other, other.zero_grad),
    }


def calls_of(run: Callable[[], None]) -> Counter[str]:
    """How often ``run`` calls functions of each name."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[frame.f_code.co_name if event == "call" else argument.__name__] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def warmed_up(layers: int) -> dict[str, Callable[[], None]]:
    """The contenders, once they do what they will do from then on."""
    runs = contenders(layers)
    for run in runs.values():
        for _ in range(5):
            run()
    return runs


def measure(
    runs: dict[str, Callable[[], None]], layers: int, rounds: int, passes: int
) -> dict[str, list[float]]:
    """Seconds a layer, forward and backward, of each round; in turn, first forwards and then backwards."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            times = []
            for _ in range(passes):
                began = time.thread_time()
                runs[name]()
                times.append(time.thread_time() - began)
            found[name].append(median(times) / layers)
    return found


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 15,
    passes: Annotated[int, typer.Option(min=1, help="Forwards and backwards in a round.")] = 5,
) -> None:
    """Time the host's part of a layer; write the result."""
    console = terminal()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    runs = warmed_up(layers)
    calls = {name: calls_of(run).total() / layers for name, run in runs.items()}
    times = measure(runs, layers, rounds, passes)
    added = {
        name: [each - base for each, base in zip(times[name], times["plain"], strict=True)]
        for name in ("zero_ext", "fsdp2")
    }
    ratio = ratio_of_rounds(added["zero_ext"], added["fsdp2"])
    note = (
        f"{layers} layers of 9 parameters, rank 0 of {RANKS}, collectives that return immediately, one "
        f"thread, {rounds} rounds of {passes} in turn. Added: beyond the plain model. Ratio: "
        "median of the rounds' (95% interval)."
    )
    columns = ["", "µs a layer", "added µs", "added calls"]
    table = Table("Host time of a layer, forward and backward", columns, note=note)
    more = {name: calls[name] - calls["plain"] for name in added}
    for name, each in times.items():
        own = [f"{1e6 * median(added[name]):.0f}", f"{more[name]:.0f}"] if name in added else ["", ""]
        table.rows.append([name, f"{1e6 * median(each):.0f}", *own])
    shown = f"{ratio.text()}, at most {BAR}"
    verdict = "met" if ratio.at_most(BAR) else "not met"
    table.rows.append(["zero_ext / fsdp2, added", shown, verdict, f"{more['zero_ext'] / more['fsdp2']:.2f}"])
    dist.destroy_process_group()
    environment = describe() | {"load average at the end": f"{os.getloadavg()[0]:.2f}"}
    data = {
        "environment": environment,
        "seconds a layer": times,
        "calls a layer": calls,
        "ratio": ratio.median,
    }
    missed = [] if ratio.at_most(BAR) else ["zero_ext / fsdp2: the bar is missed"]
    conclude(console, "host_time", "Host time", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
