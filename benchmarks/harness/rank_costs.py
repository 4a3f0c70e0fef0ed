"""The costs of one rank among N besides its shards: set-up, memory, a step's messages, checkpoint plans.

As a program (`python -m benchmarks.harness.rank_costs '<json>'`) it simulates rank 0 with torch's fake
process group and prints one line of JSON. Without an argument it is the worker of a team of real ranks.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import process_memory
from benchmarks.harness.checkpoint_plans import CheckpointPlans
from benchmarks.harness.formula import STATE_KINDS
from benchmarks.harness.message_count import MessageCount
from benchmarks.harness.shapes import Shape, build_model, shape_named
from benchmarks.harness.worker import main
from tests.opcodes import count_opcodes

TOKENS = 8
STEPS = 2  # The first one also agrees on an order of reductions.
CLIPPING = 1.0


@dataclass(frozen=True)
class RankCosts:
    """What rank 0 of `ranks` needs: bytes, seconds, and counts.

    `tensor_bytes` are storages of tensors after set-up and `object_bytes` what Python allocated in set-up and
    still holds. `resident_bytes` is the growth of the resident set from before the model to after the steps.
    All three are without `shard_bytes`, the model's state by the memory breakdown. `setup_opcodes` counts the
    opcodes of `prepare`, torch's included; `setup_seconds` is a second `prepare` in the same process.
    `collectives`, `messages` and `bytes_sent` are of the last step. The plans of checkpoints have seconds,
    and bytes as the growth of the resident set's peak. Those of a load are None if it was not planned. All
    seconds are of processor time, which the machine's other work does not change much.
    """

    shape: str
    stage: int
    ranks: int
    is_simulated: bool
    shard_bytes: int
    tensor_bytes: int
    object_bytes: int
    resident_bytes: int
    setup_opcodes: int
    setup_seconds: float
    collectives: int
    messages: int
    bytes_sent: int
    save_seconds: float
    save_bytes: int
    load_seconds: float | None = None
    load_bytes: int | None = None
    manifest_bytes: int | None = None


def measure(
    shape_name: str, stage: int, ranks: int, *, is_simulated: bool, plans_load: bool = True
) -> RankCosts:
    """Set up the model as rank 0 of `ranks` (simulated) or as this rank of real ones, make two steps, and
    plan a save. `plans_load` is false where the manifest of so many ranks takes too long."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    shape = shape_named(shape_name)
    _load_libraries(stage)
    if is_simulated:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    process_memory.return_free_pages()
    resident, tensors = process_memory.resident_bytes(), process_memory.live_tensor_bytes()
    opcodes, objects, model, optimizer = _counted_setup(shape, stage)
    engine = _engine(model)
    shards = sum(engine.memory_breakdown()[kind] for kind in STATE_KINDS)
    tensors = process_memory.live_tensor_bytes() - tensors - shards
    messages = MessageCount(engine.collectives)
    for _ in range(STEPS):
        messages.reset()
        _step(model, optimizer)
    process_memory.return_free_pages()
    resident = process_memory.resident_bytes() - resident - shards
    sent = engine.traffic.last_bytes_sent.total()
    plans = _checkpoint_plans(engine, plans_load)
    messages.restore()
    del model, optimizer, engine
    gc.collect()
    return RankCosts(
        shape_name,
        stage,
        ranks,
        is_simulated,
        shards,
        tensors,
        objects,
        resident,
        opcodes,
        _timed_setup(shape, stage),
        messages.collectives,
        messages.sent,
        sent,
        **plans,
    )


def _prepare(model: torch.nn.Module, stage: int) -> tuple[torch.nn.Module, Any]:
    import zero_ext

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"stage": stage, "gradient_clipping": CLIPPING, "units": {"persistence_threshold": 0}}
    return zero_ext.prepare(model, optimizer, config=config, init="skip")


def _on_meta(shape: Shape) -> torch.nn.Module:
    """Return the model without values, except for the buffers that no checkpoint fills."""
    with torch.device("meta"):
        model = build_model(shape)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.ones(buffer.shape, dtype=buffer.dtype))
    return model


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _load_libraries(stage: int) -> None:
    """Make a step of a throw-away model on this rank alone, so that libraries are loaded before readings."""
    model, optimizer = _prepare(build_model(shape_named("tiny")), stage)
    _step(model, optimizer)


def _counted_setup(shape: Shape, stage: int) -> tuple[int, int, torch.nn.Module, Any]:
    """Return opcodes and the bytes of Python objects that set-up leaves, and the prepared pair."""
    model, prepared = _on_meta(shape), []
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    opcodes = count_opcodes(lambda: prepared.append(_prepare(model, stage)))
    gc.collect()
    objects = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return opcodes, objects, *prepared[0]


def _timed_setup(shape: Shape, stage: int) -> float:
    model = _on_meta(shape)
    began = time.process_time()
    prepared = _prepare(model, stage)
    seconds = time.process_time() - began
    del prepared
    return seconds


def _engine(model: torch.nn.Module) -> Any:
    from zero_ext.zero import engine_of

    return engine_of(model)


def _checkpoint_plans(engine: Any, plans_load: bool) -> dict[str, Any]:
    plans = CheckpointPlans(engine)
    save_seconds, save_bytes = _cost(plans.plan_save)
    found: dict[str, Any] = {"save_seconds": save_seconds, "save_bytes": save_bytes}
    if plans_load:
        with tempfile.TemporaryDirectory(prefix="zero_ext_bench_") as folder:
            found["manifest_bytes"] = plans.write_manifest(Path(folder))
            found["load_seconds"], found["load_bytes"] = _cost(lambda: plans.plan_load(Path(folder)))
    return found


def _cost(action: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of `action` and the growth of the resident set at its peak, its result included."""
    process_memory.return_free_pages()
    process_memory.reset_peak()
    resident, began = process_memory.resident_bytes(), time.process_time()
    result = action()
    seconds = time.process_time() - began
    del result
    return seconds, process_memory.peak_bytes() - resident


class RealRank:
    """A rank of a team that measures itself with the others."""

    def measure(self, shape: str, stage: int, ranks: int) -> dict[str, Any]:
        """Measure as one of `ranks` real ranks."""
        return asdict(measure(shape, stage, ranks, is_simulated=False))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asdict(measure(**json.loads(sys.argv[1]), is_simulated=True))))
    else:
        main(RealRank(), ("measure",))
