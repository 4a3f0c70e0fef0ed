"""Runs read back: an offline one of Weights & Biases, and event files as TensorBoard itself reads them."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from wandb.proto import wandb_internal_pb2

import zero_ext
from zero_ext.monitor import monitor_of

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[Any]:
    """The whole records of a .wandb file: LevelDB's log format after seven bytes of the file's own.

    wandb's own process may still be writing: a record of which only a part has arrived ends the reading.
    """
    data = path.read_bytes()
    offset, payload = HEADER, b""
    while offset + HEADER <= len(data):
        if BLOCK - offset % BLOCK < HEADER:
            offset += BLOCK - offset % BLOCK
            continue
        # The kinds of a part: 1 whole, 2 first, 3 middle, 4 last.
        checksum, length, kind = struct.unpack_from("<IHB", data, offset)
        chunk = data[offset + HEADER : offset + HEADER + length]
        if zlib.crc32(bytes([kind]) + chunk) != checksum:
            return
        payload += chunk
        offset += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def records_of(path: Path) -> list[Any]:
    """The records once the run's end is among them: wandb's own process writes them out."""
    until = time.monotonic() + 20
    while True:
        found = list(records(path))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < until, f"{len(found)} records and no end of the run"
        time.sleep(0.05)


def trained(model: nn.Module, optimizer: Any, config: dict[str, Any], steps: int) -> list[float]:
    """The losses of some steps, whose monitor is closed."""
    prepared, optimizer = zero_ext.prepare(model, optimizer, config)
    losses = []
    for _ in range(steps):
        loss = prepared(torch.randn(2, 3)).square().mean()
        losses.append(loss.item())
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    monitor = monitor_of(prepared)
    assert monitor is not None
    monitor.close()
    return losses


def test_an_offline_run_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = nn.Linear(3, 1)
    settings = {
        "stage": 2,
        "monitor": {
            "output_dir": str(tmp_path),
            "jsonl": False,
            "wandb": {"project": "tests", "group": "ours", "name": "first", "mode": "offline"},
        },
    }
    losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.5), settings, 3)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    found = records_of(path)
    (run,) = [record.run for record in found if record.HasField("run")]
    assert (run.project, run.run_group, run.display_name) == ("tests", "ours", "first")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["stage"] == 2 and config["monitor"]["wandb"]["mode"] == "offline"
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == losses
    assert all(row["lr"] == 0.5 and row["time/step"] > 0 and "grad_norm" not in row for row in rows)


def test_event_files_read_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.5}]
    monitor = {"jsonl": False, "tensorboard": str(tmp_path / "board")}
    config = {"gradient_clipping": 1e-9, "monitor": monitor}
    losses = trained(model, torch.optim.SGD(groups, lr=0.1), config, 4)
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {"loss", "grad_norm", "lr/0", "lr/1", "seconds", "time/forward", "memory/device"} <= tags
    assert "step" not in tags and "lr" not in tags
    scalars = found.Scalars("loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert [event.value for event in scalars] == losses
    assert [event.value for event in found.Scalars("lr/1")] == [0.5] * 4
