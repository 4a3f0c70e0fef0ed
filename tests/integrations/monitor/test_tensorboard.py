"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import zero_ext
from zero_ext.monitor import monitor_of


def test_a_run_read_back(tmp_path: Path) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.5}]
    prepared, optimizer = zero_ext.prepare(
        model,
        torch.optim.SGD(groups, lr=0.1),
        {"gradient_clipping": 1e-9, "monitor": {"jsonl": False, "tensorboard": str(tmp_path / "board")}},
    )
    losses = []
    for _ in range(4):
        loss = prepared(torch.randn(2, 3)).square().mean()
        losses.append(loss.item())
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    monitor = monitor_of(prepared)
    assert monitor is not None
    monitor.close()
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {"loss", "grad_norm", "lr/0", "lr/1", "seconds", "time/forward", "memory/device"} <= tags
    assert "step" not in tags and "lr" not in tags
    scalars = found.Scalars("loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert [event.value for event in scalars] == losses
    assert [event.value for event in found.Scalars("lr/1")] == [0.5] * 4
