"""One run of the demonstration, in a separate process.

Command: `python -m demo_offload.train FOLDER RUN [NVME_FOLDER]`. RUN is "base" (a tiny model, to measure the
memory of the interpreter and its libraries), "plain" (PyTorch alone), "nvme" (zero_ext with offload) or
"memory" (zero_ext without offload). The exit status is OUT_OF_MEMORY if an allocation failed.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from demo.corpus import ByteWindows
from demo.folder import read_settings
from demo.language_model import build_model
from demo.record import write_record
from torch import Tensor, nn

import zero_ext
from demo_offload.settings import OffloadSettings
from demo_offload.timeline import Recorder, process_memory
from zero_ext.zero import engine_of

OUT_OF_MEMORY = 3
MEGA = 1e6
TINY = {"hidden_size": 32, "layers": 2, "feed_forward_size": 64, "heads": 2, "steps": 1}


def text_windows(settings: OffloadSettings) -> Tensor:
    """Return one window of `pydoc`'s language topics per step, int64 [steps, 1, window]."""
    text = torch.frombuffer(bytearray("\0".join(topics.values()).encode()), dtype=torch.uint8)
    return ByteWindows(text, settings.window).spread(settings.steps).unsqueeze(1)


def build_optimizer(parameters: list[nn.Parameter], settings: OffloadSettings) -> torch.optim.AdamW:
    """Return AdamW that updates one tensor at a time, because `foreach` would copy all of them."""
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )


def train_plain(settings: OffloadSettings, recorder: Recorder) -> dict[str, Any]:
    """Train with PyTorch alone: bf16 parameters, and fp32 master weights that AdamW updates."""
    model = build_model(settings, torch.bfloat16)
    parameters = list(model.parameters())
    recorder.device = sum(parameter.nbytes for parameter in parameters)
    _say("bf16 parameters allocated", recorder.device)
    masters = []
    for parameter in parameters:
        masters.append(nn.Parameter(parameter.detach().float()))
        recorder.device += masters[-1].nbytes
    _say("fp32 master weights allocated", recorder.device)
    weights = recorder.device
    optimizer = build_optimizer(masters, settings)
    losses = []
    for recorder.step, window in enumerate(text_windows(settings), 1):
        loss = model(input_ids=window, labels=window).loss
        loss.backward()
        recorder.device += sum(parameter.grad.nbytes for parameter in parameters)
        _say(f"step {recorder.step}: gradients allocated", recorder.device)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        recorder.device = weights + moments
        losses.append(loss.item())
        _say(f"step {recorder.step}: loss {losses[-1]:.4f}", recorder.device)
    return {"losses": losses}


def train_zero(settings: OffloadSettings, recorder: Recorder, nvme: Path | None) -> dict[str, Any]:
    """Train the same model with zero_ext.

    Args:
        settings: Shape of the model and hyperparameters.
        recorder: Recorder of the memory timeline.
        nvme: Folder for parameters and optimizer state, with gradients in host memory. None keeps everything
            on the device.
    """
    model = build_model(settings, torch.bfloat16)
    recorder.device = sum(parameter.nbytes for parameter in model.parameters())
    _say("bf16 parameters allocated", recorder.device)
    config: dict[str, Any] = {"stage": 3, "precision": {"dtype": "bf16"}}
    if nvme is not None:
        config["offload"] = {
            "params": "nvme",
            "grads": "host",
            "optimizer": "nvme",
            "nvme_paths": [str(nvme)],
            "staging_buffer_bytes": settings.staging_buffer_bytes,
        }
    optimizer = build_optimizer(list(model.parameters()), settings)
    model, optimizer = zero_ext.prepare(model, optimizer, config)
    engine = engine_of(model)

    def note(event: object = None) -> None:
        recorder.device, recorder.host = memory_by_tier(engine)

    note()
    engine.subscribe(note)
    _say("prepared", recorder.device + recorder.host)
    losses, seconds = [], []
    for recorder.step, window in enumerate(text_windows(settings), 1):
        began = time.perf_counter()
        loss = model(input_ids=window, labels=window).loss
        loss.backward()
        note()
        optimizer.step()
        optimizer.zero_grad()
        note()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        _say(f"step {recorder.step}: loss {losses[-1]:.4f}", recorder.device + recorder.host)
    moved = {f"{source} → {target}": n for (source, target), n in engine.tiers.transfers.last_moved.items()}
    return {"losses": losses, "seconds": seconds, "moved": moved, "tiers": tiers_of_kinds(engine)}


def tiers_of_kinds(engine: Any) -> dict[str, str]:
    """Return the tier of every state kind."""
    offload = engine.config.offload
    return {kind: getattr(offload, kind) for kind in ("params", "grads", "optimizer")}


def memory_by_tier(engine: Any) -> tuple[int, int]:
    """Return the bytes of state and staging in device memory and in host memory."""
    held = engine.memory_by_tier()
    return sum(held["device"].values()), sum(held["host"].values())


def _say(what: str, held: int) -> None:
    resident = process_memory()[0]
    print(f"{what}, state in memory {held / MEGA:.0f} MB, process {resident / MEGA:.0f} MB", flush=True)


def _refused_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "not enough memory" in text


def main(folder: Path, run: str, nvme: Path | None) -> None:
    settings = read_settings(OffloadSettings, folder)
    if run == "base":
        settings = dataclasses.replace(settings, **TINY)
    try:
        with Recorder(folder / f"{run}-timeline.csv", nvme, settings.sample_seconds) as recorder:
            if run in ("base", "plain"):
                record = train_plain(settings, recorder)
            if run != "plain":
                record = train_zero(settings, recorder, nvme)
    except (MemoryError, RuntimeError) as error:
        if not _refused_memory(error):
            raise
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        sys.exit(OUT_OF_MEMORY)
    write_record(folder, run, 0, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
