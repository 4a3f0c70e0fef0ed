"""Weights on NVMe and several micro-batches: ordinary accumulation and the layer-major schedule, in turn.

Run from the repository root: python -m benchmarks.layer_major [--model 239m] [--tokens 128,64,32]
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import zero_ext
from benchmarks.harness.environment import describe
from benchmarks.harness.llama_layers import llama_layers, next_token_loss
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import LlamaShape, batch_for, shape_named
from benchmarks.harness.statistics import ratio_of_rounds
from benchmarks.peers.base import adamw, nvme_folder
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import Pipeline, PipelineModule
from zero_ext.zero import engine_of

FASTER_BAR = 1.5
ORDINARY = "accumulation"
SCHEDULES = (ORDINARY, "layer-major", "layer-major, checkpointed")
Train = Callable[[torch.Tensor], object]


class Gradients:
    """Stands for an optimizer: keeps what its step would have used."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self.found: list[torch.Tensor] = []

    def step(self) -> None:
        gradients = map(zero_ext.full_gradient, self._model.parameters())
        self.found = [each for each in gradients if each is not None]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def contenders(model: Any, optimizer: Any, micro_batches: int) -> dict[str, Train]:
    """Steps on a batch [micro-batches, tokens], by name."""

    def accumulate(batch: torch.Tensor) -> None:
        for micro_batch in batch.chunk(micro_batches):
            model.backward(next_token_loss(model(0, micro_batch), micro_batch) / micro_batches)
        optimizer.step()
        optimizer.zero_grad()

    def train(pipeline: Pipeline, batch: torch.Tensor) -> None:
        pipeline.train_batch(batch, targets=batch)

    found: dict[str, Train] = {ORDINARY: accumulate}
    for name, checkpoint in zip(SCHEDULES[1:], (False, True), strict=True):
        pipeline = Pipeline(model, optimizer, micro_batches=micro_batches, checkpoint=checkpoint)
        found[name] = partial(train, pipeline)
    return found


def largest_difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Of two gradients, relative to the largest element."""
    return max(
        float((mine - theirs).abs().max() / theirs.abs().max())
        for mine, theirs in zip(found, wanted, strict=True)
    )


def measure(
    shape: LlamaShape, micro_batches: int, lengths: list[int], rounds: int
) -> dict[int, dict[str, dict[str, Any]]]:
    """Seconds and bytes of every round's step, one model's, by the tokens of a micro-batch, and how far
    gradients are from accumulation's."""
    module = PipelineModule(
        llama_layers(shape), make_mesh(pp=1), loss=next_token_loss, schedule="layer_major"
    )
    config = {
        "stage": 3,
        "precision": {"dtype": "bf16"},
        "batch": {"gradient_accumulation_steps": micro_batches},
        "units": {"persistence_threshold": 0},
        "offload": {"params": "nvme", "nvme_paths": [nvme_folder()]},
    }
    model, optimizer = zero_ext.prepare(module, adamw(list(module.parameters())), config)
    moved = engine_of(model).tiers.transfers

    def batch(step: int, tokens: int) -> torch.Tensor:
        numbers = range(step * micro_batches, (step + 1) * micro_batches)
        return torch.cat([batch_for(shape, 0, number, tokens) for number in numbers])

    found: dict[int, dict[str, dict[str, Any]]] = {}
    for tokens in lengths:
        rows = found[tokens] = {name: {"seconds": [], "bytes": []} for name in SCHEDULES}
        looks = Gradients(model, optimizer)
        wanted: list[torch.Tensor] = []
        for name, train in contenders(model, looks, micro_batches).items():
            train(batch(0, tokens))
            wanted = wanted or looks.found
            rows[name]["difference"] = largest_difference(looks.found, wanted)
        del looks, wanted
        trains = contenders(model, optimizer, micro_batches)
        for step in range(rounds + 1):
            for name, train in trains.items():
                began = time.perf_counter()
                train(batch(step, tokens))
                if step:  # the first one finds the order of the gathers
                    rows[name]["seconds"].append(time.perf_counter() - began)
                    rows[name]["bytes"].append(moved.last_moved["nvme", "device"])
    return found


def table_of(found: dict[int, dict[str, dict[str, Any]]], shape: LlamaShape, micro_batches: int) -> Table:
    """Contenders beside ordinary accumulation."""
    table = Table(
        f"{shape.parameters / 1e6:.0f}M Llama, weights on NVMe, {micro_batches} micro-batches a step",
        (
            "tokens a micro-batch",
            "schedule",
            "read MB/step",
            "of accumulation",
            "s/step",
            "times as fast",
            "95% interval",
            "gradients off by",
        ),
        note=f"Bars: 1/{micro_batches} of the bytes, {FASTER_BAR} times as fast where reading takes longer "
        "than computing, the same gradients. One model trains by each in turn; ratios are medians.",
    )
    for tokens, rows in found.items():
        ordinary = rows[ORDINARY]
        for name, row in rows.items():
            faster = ratio_of_rounds(ordinary["seconds"], row["seconds"])
            table.rows.append(
                [
                    str(tokens),
                    name,
                    megabytes(median(row["bytes"])),
                    f"{median(row['bytes']) / median(ordinary['bytes']):.4f}",
                    f"{median(row['seconds']):.2f}",
                    f"{faster.median:.2f}",
                    faster.interval(),
                    f"{row['difference']:.1e}",
                ]
            )
    return table


def failures_of(found: dict[int, dict[str, dict[str, Any]]], micro_batches: int) -> list[str]:
    """The bars that were missed."""
    missed, ratios = [], []
    for tokens, rows in found.items():
        ordinary, others = rows[ORDINARY], {name: rows[name] for name in SCHEDULES[1:]}
        for name, row in others.items():
            if row["bytes"][-1] * micro_batches != ordinary["bytes"][-1]:
                wanted = ordinary["bytes"][-1] // micro_batches
                missed.append(f"{name}, {tokens} tokens: {row['bytes'][-1]} bytes read, {wanted} wanted")
            if row["difference"] > 1e-5:
                missed.append(f"{name}, {tokens} tokens: other gradients")
            ratios.append(ratio_of_rounds(ordinary["seconds"], row["seconds"]))
    if not any(ratio.at_least(FASTER_BAR) for ratio in ratios):
        best = max(ratios, key=lambda ratio: ratio.low).text()
        missed.append(f"{best} times as fast as accumulation, {FASTER_BAR} wanted")
    return missed


def main(
    model: Annotated[str, typer.Option(help="A Llama's shape: tiny, 34m, 239m.")] = "239m",
    micro_batches: Annotated[int, typer.Option(min=1, help="Of one sequence each.")] = 8,
    tokens: Annotated[str, typer.Option(help="Lengths of a sequence.")] = "128,64,32",
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each schedule.")] = 9,
) -> None:
    """Measure bytes and seconds of both schedules; write the result."""
    console, shape = terminal(), shape_named(model)
    if not isinstance(shape, LlamaShape):
        raise typer.BadParameter(f"{model} is no Llama")
    lengths = [int(length) for length in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        with console.status(f"training {model}"):
            found = measure(shape, micro_batches, lengths, rounds)
        dist.destroy_process_group()
    data = {"environment": {**describe(), "NVMe folder": nvme_folder()}, "model": model, "schedules": found}
    tables = [table_of(found, shape, micro_batches)]
    failures = failures_of(found, micro_batches)
    conclude(
        console, "layer_major", "All micro-batches through a layer before the next", tables, data, failures
    )


if __name__ == "__main__":
    typer.run(main)
