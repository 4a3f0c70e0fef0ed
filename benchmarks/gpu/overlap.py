"""How much of the smaller of compute and transfer a step with its optimizer on the host hides."""

from __future__ import annotations

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.copies import pinned
from benchmarks.gpu.result import Bar, Result
from benchmarks.gpu.shard import shard_of
from benchmarks.gpu.trainers import ZeroExt

LEAST_HIDDEN = 0.8
NOTE = (
    "compute: forward and backward of the plain model on the device. transfer: the bytes that the engine"
    " counted between device and host in a step, each way copied alone from pinned memory. update: the"
    " one-pass Adam alone on as many elements in host memory. hidden: (compute + transfer + update - step)"
    " over the smaller of compute and transfer. All times on the host's clock until the device has finished."
)


def transfer_seconds(nbytes: int, up: bool, device: torch.device, clock: Clock) -> float:
    """Seconds of one copy of `nbytes`, taken from one of at most 1 GiB."""
    size = min(max(nbytes, 1), 2**30)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    with pinned(size, device) as host:
        into, source = (there, host) if up else (host, there)
        copies = [clock.wall_seconds(lambda: into.copy_(source, non_blocking=True)) for _ in range(5)]
    return sorted(copies)[2] * nbytes / size


def update_seconds(elements: int, clock: Clock) -> float:
    """Seconds of the one-pass Adam on `elements` in host memory, taken from at most 2^27 of them."""
    count = min(elements, 2**27)
    shard = shard_of(count, torch.device("cpu"))
    grad = torch.randn(count).bfloat16()
    param = torch.empty(count, dtype=torch.bfloat16)
    updates = [clock.wall_seconds(lambda: shard.update(grad, param)) for _ in range(5)]
    return sorted(updates)[2] * elements / count


def hidden_share(compute: float, transfer: float, update: float, step: float) -> float:
    """Share of the smaller of compute and transfer that does not show in the step."""
    return (compute + transfer + update - step) / min(compute, transfer)


def measure_overlap(
    trainer: ZeroExt, step: float, compute: float, device: torch.device, clock: Clock, result: Result
) -> None:
    """Adds the table and the bar; `trainer` has made steps of `step` seconds."""
    columns = ("compute ms", "transfer ms", "update ms", "step ms", "GB down", "GB up", "hidden")
    rows = result.table("What a step with optimizer and gradients on the host hides", columns, NOTE)
    moved = trainer.engine.tiers.transfers.last_moved
    down, up = moved["device", "host"], moved["host", "device"]
    transfer = transfer_seconds(down, False, device, clock) + transfer_seconds(up, True, device, clock)
    elements = sum(unit.layout.shard_numel for unit in trainer.engine.units)
    update = update_seconds(elements, clock)
    hidden = hidden_share(compute, transfer, update, step)
    seconds = {"compute": compute, "transfer": transfer, "update": update, "step": step}
    cells = [f"{1e3 * value:.1f}" for value in seconds.values()]
    rows.append([*cells, f"{down / 1e9:.2f}", f"{up / 1e9:.2f}", f"{hidden:.2f}"])
    result.data["overlap"] = {"seconds": seconds, "down": down, "up": up, "hidden": hidden}
    result.bars.append(Bar("share of the smaller of compute and transfer hidden", hidden, LEAST_HIDDEN))
