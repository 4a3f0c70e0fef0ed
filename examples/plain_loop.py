"""A plain training loop with ZeRO-3. Only the three lines marked `zero_ext` differ from ordinary PyTorch.

Train on two ranks, then resume on one:

    torchrun --nproc-per-node 2 examples/plain_loop.py
    python examples/plain_loop.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import zero_ext
from zero_ext.data import ShardedLoader
from zero_ext.zero import engine_of

CHECKPOINTS = Path("runs") / "plain-loop"
STEPS_A_RUN = 200


def teacher_data(samples: int = 4096) -> TensorDataset:
    """Return random inputs [samples, 32] and the outputs [samples, 8] of a fixed random network for them."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    inputs = torch.randn(samples, 32)
    return TensorDataset(inputs, teacher(inputs).detach())


def main() -> None:
    data = teacher_data()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})  # zero_ext
    engine = engine_of(model)

    batch = 64 // engine.world_size
    loader = ShardedLoader(data, batch, rank=engine.rank, world_size=engine.world_size)
    if CHECKPOINTS.exists():
        zero_ext.load_checkpoint(CHECKPOINTS, model, loader=loader)  # zero_ext
    last = engine.steps + STEPS_A_RUN
    while engine.steps < last:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine.steps % 50 == 0 and engine.rank == 0:
                print(f"epoch {loader.epoch}, step {engine.steps}: loss {loss.item():.5f}", flush=True)
            if engine.steps == last:
                break
    zero_ext.save_checkpoint(CHECKPOINTS, model, loader=loader)  # zero_ext


if __name__ == "__main__":
    main()
