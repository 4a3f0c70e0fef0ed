"""One rank of a pipelined, split and sharded model among many, simulated beside what was planned for it.

Runs as a program of its own (`python -m benchmarks.harness.simulated_layout '<json>'`) and prints one line of
JSON. The model has no values, and the process group is torch's fake one.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zero_ext.plan.layout import ParallelLayout, rank_needs
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.simulation import Training, Transformer, machine_named

KINDS = ("params", "grads", "optimizer")


@dataclass(frozen=True)
class SimulatedStage:
    """A rank of pipeline stage `stage` after set-up: bytes held and planned by kind, its schedule's passes
    and the most micro-batches under way in it, turns of the whole pipeline, and its units."""

    stage: int
    held: dict[str, int]
    planned: dict[str, int]
    forwards: int
    backwards: int
    in_flight: int
    turns: int
    units: int
    exchanged: dict[str, int]
    seconds: float


class Block(nn.Module):
    """The parameters of a GPT's layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attend, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)


def planned_layout(pp: int, dp: int, tp: int, stage: int, micro_batches: int) -> ParallelLayout:
    """A sample a micro-batch, state on the device."""
    return ParallelLayout(pp, tp, Training(dp, stage=stage, accumulation_steps=micro_batches))


def untied(name: str) -> ModelSpec:
    """The preset with an output matrix of its own."""
    return ModelSpec.of_shape(replace(model_named(name).shape, tied=False), "")


def simulate(name: str, lengths: list[int], zero: int, micro_batches: int, stage: int) -> SimulatedStage:
    """A rank of pipeline stage `stage` of model `name` in `lengths` (pp, dp, tp) with ZeRO's stage `zero`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import zero_ext
    from zero_ext.parallel.pipeline import Pipeline
    from zero_ext.plan import collective_elements
    from zero_ext.zero import engine_of

    pp, dp, tp = lengths
    layout, model = planned_layout(pp, dp, tp, zero, micro_batches), untied(name)
    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.gpus)
    # Rank 0, whose word the fake group takes for that of all, stands in the stage wanted.
    ranks = torch.arange(layout.gpus, device="cpu").sub(stage * dp * tp).remainder(layout.gpus)
    mesh = DeviceMesh("cpu", ranks.view(pp, dp, 1, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    with torch.device("meta"):
        module = _module(model.shape, mesh)
    config = {"stage": zero, "precision": {"dtype": "bf16"}}
    config["batch"] = {"gradient_accumulation_steps": micro_batches}
    optimizer = torch.optim.AdamW(module.parameters())
    prepared, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh, init="skip")
    grad_reduction: Literal["per_step", "per_micro_batch"]
    grad_reduction = "per_micro_batch" if layout.reduces_each else "per_step"
    pipeline = Pipeline(prepared, optimizer, micro_batches=micro_batches, grad_reduction=grad_reduction)
    runner: Any = pipeline._runner
    order = runner._make().schedule._get_pipeline_order()
    engine = engine_of(prepared)
    breakdown = engine.memory_breakdown()
    planned = rank_needs(model, layout, machine_named("dgx-a100"), stage).needs.device
    padded = sum(unit.layout.numel for unit in engine.units)
    kinds = [_kind(action) for action in order[stage]]
    return SimulatedStage(
        stage,
        {kind: breakdown[kind] for kind in KINDS},
        {kind: planned[kind] for kind in KINDS},
        kinds.count("F"),
        kinds.count("B"),
        _in_flight(kinds),
        _turns(order),
        len(engine.units),
        collective_elements(zero, dp, padded, accumulation_steps=micro_batches),
        time.perf_counter() - began,
    )


def _module(shape: Transformer, mesh: Any) -> nn.Module:
    from zero_ext.parallel.pipeline import LayerSpec, PipelineModule

    layers = [
        LayerSpec(nn.Embedding, shape.vocabulary, shape.hidden),
        *(LayerSpec(Block, shape.hidden) for _ in range(shape.layers)),
        LayerSpec(nn.LayerNorm, shape.hidden),
        LayerSpec(nn.Linear, shape.hidden, shape.vocabulary, bias=False),
    ]
    module = PipelineModule(layers, mesh, loss=nn.functional.cross_entropy).bfloat16()
    for layer in module.layers.values():
        if isinstance(layer, Block):
            styles = {
                "attend": ColwiseParallel(),
                "project": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(layer, mesh["tp"], styles)
        elif isinstance(layer, nn.Embedding):
            parallelize_module(layer, mesh["tp"], RowwiseParallel(input_layouts=Replicate()))
        elif isinstance(layer, nn.Linear):
            parallelize_module(layer, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return module


def _kind(action: Any) -> str:
    """ "F", "B", or nothing for a wait and for what torch reduces itself."""
    found = "" if action is None else action.computation_type.name
    return {"FORWARD": "F", "FULL_BACKWARD": "B"}.get(found, "")


def _in_flight(kinds: list[str]) -> int:
    most = now = 0
    for kind in kinds:
        now += {"F": 1, "B": -1}.get(kind, 0)
        most = max(most, now)
    return most


def _turns(order: dict[int, list[Any]]) -> int:
    """How long the whole schedule is, in forwards with their backwards; a backward takes two forwards.

    Passes of a kind are counted in their order on each rank.
    """
    last, clock = max(order), dict.fromkeys(order, 0)
    left = {rank: [kind for action in order[rank] if (kind := _kind(action))] for rank in order}
    ended: dict[tuple[str, int], list[int]] = {(kind, rank): [] for kind in "FB" for rank in order}
    while any(left.values()):
        for rank, kinds in left.items():
            while kinds:
                kind = kinds[0]
                own = ended[kind, rank]
                before = ("F", rank - 1) if kind == "F" else ("B", rank + 1) if rank < last else ("F", rank)
                ready = [0] * (len(own) + 1) if before == ("F", -1) else ended[before]
                if len(ready) <= len(own):
                    break
                clock[rank] = max(clock[rank], ready[len(own)]) + (1 if kind == "F" else 2)
                own.append(clock[rank])
                kinds.pop(0)
    return max(clock.values()) // 3


if __name__ == "__main__":
    print(json.dumps(asdict(simulate(**json.loads(sys.argv[1])))))
