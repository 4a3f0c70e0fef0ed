"""One rank of a large job, simulated: a fake process group of any size, a model without values.

Runs as a program of its own (`python -m benchmarks.harness.simulated '<json>'`) and prints one line of JSON.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.harness import process_memory
from benchmarks.harness.shapes import build_model, shape_named


@dataclass(frozen=True)
class SimulatedRank:
    """What one rank of `ranks` holds after set-up, in bytes, and how long set-up took, in seconds."""

    shape: str
    stage: int
    ranks: int
    breakdown: dict[str, int]
    model_seconds: float
    prepare_seconds: float
    resident_growth: int
    live_tensors: int


def simulate(shape_name: str, stage: int, ranks: int) -> SimulatedRank:
    """Build the model on the meta device and prepare it as rank 0 of `ranks`; no value is ever stored."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import zero_ext
    from zero_ext.zero import engine_of

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    shape = shape_named(shape_name)
    began = time.perf_counter()
    with torch.device("meta"):
        model = build_model(shape)
    built = time.perf_counter()
    before = process_memory.resident_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"stage": stage, "gradient_clipping": 1.0, "units": {"persistence_threshold": 0}}
    model, optimizer = zero_ext.prepare(model, optimizer, config=config, init="skip")
    done = time.perf_counter()
    return SimulatedRank(
        shape_name,
        stage,
        ranks,
        dict(engine_of(model).memory_breakdown()),
        built - began,
        done - built,
        process_memory.resident_bytes() - before,
        process_memory.live_tensor_bytes(),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(simulate(**json.loads(sys.argv[1])))))
