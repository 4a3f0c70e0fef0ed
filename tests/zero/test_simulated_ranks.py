"""One rank of 1,024, simulated: bytes and wire elements of a Llama shape that was never in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import zero_ext
from tests.accelerator.stand_in import enable
from zero_ext.comm.process_group import make_collectives
from zero_ext.plan import TrainingState, collective_elements, model_state_bytes
from zero_ext.zero import engine_of
from zero_ext.zero.units.flat_layout import ALIGNMENT_BYTES

RANKS, RANKS_PER_NODE = 1024, 8
HIDDEN, LAYERS, FEED_FORWARD, VOCABULARY = 256, 4, 688, 4000
SETTINGS = [
    (0, 1, False),
    (1, 2, False),
    (2, 2, False),
    (3, 1, False),
    (3, 2, True),
]  # stage, micro-batches, no_sync


class Layer(nn.Module):
    """Llama's parameters, with the cheapest forward that uses them all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in ("query", "key", "value", "out")}
        )
        self.gate = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.up = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(HIDDEN)) for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = hidden * self.norms[0]
        mixed = sum(self.attention[name](seen) for name in ("query", "key", "value"))
        hidden = hidden + self.attention["out"](mixed)
        seen = hidden * self.norms[1]
        return hidden + self.down(functional.silu(self.gate(seen)) * self.up(seen))


class Llama(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).float().square().mean()


def simulate(stage: int, micro_batches: int, no_sync: bool, device: str = "cpu") -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with torch.device("meta"):
        model = Llama()
    config = {
        "stage": stage,
        "precision": {"dtype": "bf16"},
        "batch": {"gradient_accumulation_steps": micro_batches},
    }
    model, optimizer = zero_ext.prepare(
        model, torch.optim.AdamW(model.parameters()), config, init="skip", device=device
    )
    engine = engine_of(model)
    assert engine.world_size == RANKS
    for _ in range(2):  # the first step also agrees on an order of reductions
        for micro in range(micro_batches):
            with model.no_sync() if no_sync and micro + 1 < micro_batches else torch.enable_grad():
                model(torch.zeros(1, 3, dtype=torch.int64, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    crossing = engine.traffic.last_crossing_bytes
    result = {
        "memory": engine.memory_breakdown(),
        "traffic": {kind: count for kind, count in engine.traffic.last_elements.items() if kind != "scalars"},
        "reduction": engine.collectives.reduction,
        "nodes": engine.collectives.nodes.nodes,
        "crossing": crossing.total() - crossing["scalars"],
        "padded": sum(unit.layout.numel for unit in engine.units),
        "once": [engine.index[each.weight][0].layout.numel for each in (model.embedding, model.head)],
        "units": len(engine.units),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    dist.destroy_process_group()
    return result


def simulated(device: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.zero.test_simulated_ranks", device],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_a_device_sends_to_other_nodes_is_no_more_than_a_rings_share() -> None:
    """Rings over all ranks send (N - 1) / N of the bytes out of each node, whose ranks share them."""
    for result in simulated("stand_in"):
        assert result["reduction"] == "node_order" and result["nodes"] == RANKS // RANKS_PER_NODE
        elements = sum(result["traffic"].values())
        ring = 2 * elements * (RANKS - 1) / RANKS / RANKS_PER_NODE
        assert 0.95 * ring < result["crossing"] <= 1.05 * ring


def test_bytes_and_sent_elements_equal_the_formula() -> None:
    results = simulated("cpu")
    psi = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN
    for (stage, micro_batches, no_sync), result in zip(SETTINGS, results, strict=True):
        assert result["parameters"] == psi
        padded = result["padded"]
        assert psi <= padded <= psi + (result["units"] * RANKS + 40) * ALIGNMENT_BYTES // 2
        state = TrainingState({"bf16": padded}, accumulation_steps=micro_batches)
        exact = model_state_bytes(stage, RANKS, state)
        allocated_bytes = result["memory"]
        assert (allocated_bytes["params"], allocated_bytes["grads"], allocated_bytes["optimizer"]) == (
            exact.params,
            exact.grads,
            exact.optimizer,
        ), stage
        assert result["traffic"] == collective_elements(
            stage,
            RANKS,
            padded,
            gathered_once=sum(result["once"]),
            accumulation_steps=micro_batches,
            no_sync=no_sync,
        ), stage
    # Stages 2 and 3 against the paper's 2P + 14P/N and 16P/N, with fp32 gradients where micro-batches add up.
    assert (
        sum(results[3]["memory"][kind] for kind in ("params", "grads", "optimizer")) * RANKS
        == 16 * (results[3]["padded"])
    )


def test_collectives_of_groups_and_of_unequal_tensors_end() -> None:
    (found,) = simulated("groups")
    same = [7.0] * 5
    assert found == {"broadcast here": same, "broadcast there": same, "sent": [7.0], "sum": same}


def exchanged() -> dict[str, list[float]]:
    """What a rank of simulated ones has after collectives in which little fits what another rank sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    full_model = make_collectives(None, 10.0)
    group = full_model.among([0, 2, 4, 6])
    mine = group.broadcast_(torch.full((5,), 7.0), 0, "broadcast")
    theirs = group.broadcast_(torch.full((5,), 7.0), 1, "broadcast")
    sent = torch.full((1,), 7.0)
    receives, sends = [sent] + [torch.ones(3)] * 3, [sent] + [torch.ones(2)] * 3
    group.exchange_payloads(receives, sends, "scalars", 1, "exchange").wait()
    dist.destroy_process_group()
    return {
        "broadcast here": mine.tolist(),
        "broadcast there": theirs.tolist(),
        "sent": sent.tolist(),
        "sum": full_model.sum_(torch.full((5,), 7.0), "sum").tolist(),
    }


if __name__ == "__main__":
    if sys.argv[1] == "groups":
        print(json.dumps(exchanged()))
        sys.exit()
    if sys.argv[1] == "stand_in":
        enable()
    for setting in SETTINGS if sys.argv[1] == "cpu" else [(2, 1, False), (3, 1, False)]:
        print(json.dumps(simulate(*setting, device=sys.argv[1])))
