"""The rates of this machine, measured in half a minute: the figures for plans and simulations."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from zero_ext import ops
from zero_ext.cli.nvme_sweep import Setting, buffer_bytes, device_file, engine_pass
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import AioConfig
from zero_ext.config.sources.json_file import read_json_object
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.simulation.hardware import Hardware

_MIB = 1 << 20
_PASSES = 5
_BUDGET_SECONDS = 1.0  # of one figure
_ADAM_BYTES = 2 * 12 + 2 + 2  # of an element: state read and written, gradient read, parameter written
_HYPER = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, 1.0, 0.0)  # in the order that adam_step_ takes
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LINKS = ("intra_bandwidth", "inter_bandwidth")
_GATHER_PASSES = 9
_SMALL_ELEMENTS = 4096
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Scale:
    """The amounts to move and compute: sizes in bytes, ``product`` the side of square matrices."""

    memory: int = 256 * _MIB
    file: int = 512 * _MIB
    exchanged: int = 64 * _MIB
    product: int = 0  # by the device: 4096 on an accelerator, 1024 else


def measure_machine(
    name: str,
    ranks: int | None,
    folder: Path | None,
    scale: Scale | None = None,
    tick: Callable[[str], None] = print,
) -> Hardware:
    """Measure this host: memory, products, the optimizer's update, copies to and from an accelerator, a
    directory ``folder`` on NVMe, and collectives of ``ranks`` processes (default: one a device, two without).

    A tier that is missing gets one byte. Rates between hosts are those inside this one. ``tick`` is called
    with what is being measured. RuntimeError with the reason if the ranks or the device fail.
    """
    scale = scale or Scale()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator if accelerator is not None else torch.device("cpu")
    ranks = ranks or (torch.accelerator.device_count() if accelerator is not None else 2)
    tick(f"products and memory of {device}")
    bandwidth = copy_rate(device, device, scale.memory)
    values: dict[str, object] = {
        "name": name or platform.node() or "this machine",
        "ranks_per_node": ranks,
        "matmul_flops": product_rate(device, scale.product or (1024 if accelerator is None else 4096)),
        "matmul_efficiency": 1.0,
        "device_bytes": _device_bytes(device, ranks),
        "device_bandwidth": 2 * bandwidth,
        "unit_seconds": unit_seconds(device),
        "host_bytes": host_bytes(),
        "device_is_host": accelerator is None,
    }
    tick("the optimizer's update on the host")
    values["host_bandwidth"] = update_rate(scale.memory)
    tick("copies between device and host")
    to_host, to_device = _copies(device, scale.memory, bandwidth)
    values |= {"to_host": to_host, "to_device": to_device}
    values |= {"node_to_host": to_host * ranks, "node_to_device": to_device * ranks}
    values |= _stored(folder, scale.file, tick)
    tick(f"collectives of {ranks} ranks")
    values |= _collectives(ranks, scale.exchanged, bandwidth)
    return Hardware.from_mapping(values)


def product_rate(device: torch.device, side: int) -> float:
    """FLOP/s of square matrix products, in 16 bits or, where that is slower, in 32."""

    def rate(dtype: torch.dtype) -> float:
        left, right = (
            torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2)
        )
        return 2 * side**3 / _seconds(device, lambda: left @ right)

    return max(rate(torch.bfloat16), rate(torch.float32))


def copy_rate(source: torch.device, target: torch.device, nbytes: int) -> float:
    """Return bytes per second of a copy."""
    pinned = source.type != target.type
    tensors = [
        torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu")
        for device in (source, target)
    ]
    device = source if source.type != "cpu" else target
    return nbytes / _seconds(device, lambda: tensors[1].copy_(tensors[0], non_blocking=True))


def update_rate(nbytes: int) -> float:
    """Return bytes per second of an Adam step over state of ``nbytes`` in host memory, as the engine
    makes it.
    """
    elements = nbytes // 12
    master, first, second = (torch.zeros(elements, dtype=torch.float32, device="cpu") for _ in range(3))
    gradient = torch.ones(elements, dtype=torch.bfloat16, device="cpu")
    output = torch.zeros(elements, dtype=torch.bfloat16, device="cpu")
    segments = torch.tensor([[0, elements]], dtype=torch.int64, device="cpu")
    hyper = torch.tensor([_HYPER], dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float32, device="cpu")

    def step() -> None:
        ops.adam_step_(master, first, second, gradient, output, segments, hyper, one)

    return elements * _ADAM_BYTES / _seconds(torch.device("cpu"), step)


def unit_seconds(device: torch.device) -> float:
    """Return what a forward of a block takes that has next to nothing to compute."""
    width = 64
    block = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width)
    ).to(device)
    inputs = torch.zeros(1, width, device=device)
    return _seconds(device, lambda: block(inputs))


def host_bytes() -> int:
    """Memory of this host, or what the control group allows of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _device_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cpu":
        return max(1, host_bytes() // ranks)
    return int(torch.accelerator.get_memory_info(device)[1])


def _copies(device: torch.device, nbytes: int, bandwidth: float) -> tuple[float, float]:
    """Rates to host memory and from it."""
    if device.type == "cpu":
        return bandwidth, bandwidth
    host = torch.device("cpu")
    return copy_rate(device, host, nbytes), copy_rate(host, device, nbytes)


def _stored(folder: Path | None, nbytes: int, tick: Callable[[str], None]) -> dict[str, object]:
    if folder is None:
        return {"nvme_bytes": 1, "nvme_read": 1.0, "nvme_write": 1.0}
    tick(f"reads and writes in {folder}")
    policy = AioConfig()
    backend = next(name for name, reason in ops.aio_backends().items() if not reason)
    setting = Setting(backend, policy.block_bytes, policy.queue_depth, policy.io_threads)
    with device_file(folder, nbytes) as (file, _):
        memory = ops.host_buffer(buffer_bytes(setting))
        memory.view(torch.int64).random_()
        passes = [
            (engine_pass(file, setting, memory, True), engine_pass(file, setting, memory, False))
            for _ in range(3)
        ]
    write, read = (nbytes / median(one[number].seconds for one in passes) for number in range(2))
    return {"nvme_bytes": shutil.disk_usage(folder).free, "nvme_read": read, "nvme_write": write}


def _collectives(ranks: int, nbytes: int, bandwidth: float) -> dict[str, object]:
    if ranks == 1:
        return {**dict.fromkeys(_LINKS, bandwidth), "collective_seconds": 0.0}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with tempfile.TemporaryDirectory(prefix="zero-ext-measure-") as folder:
        result = Path(folder) / "result.json"
        run = subprocess.run(
            [sys.executable, *several, "-m", "zero_ext.cli.measure_machine", str(result), str(nbytes)],
            env={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if run.returncode or not result.exists():
            last = (run.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(
                f"--ranks: measuring the collectives of {ranks} ranks failed with: {last}. Check "
                "MASTER_ADDR and the free memory, or measure with --ranks 1."
            )
        found = read_json_object(result)
    return {**dict.fromkeys(_LINKS, found["bandwidth"]), "collective_seconds": found["latency"]}


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the lower quartile of some passes, after one that does not count: others may be at work here
    too.
    """

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    run()
    wait()
    samples: list[float] = []
    while len(samples) < _PASSES or (sum(samples) < _BUDGET_SECONDS / 4 and len(samples) < 200):
        begin = time.perf_counter()
        run()
        wait()
        samples.append(time.perf_counter() - begin)
        if sum(samples) > _BUDGET_SECONDS:
            break
    return max(sorted(samples)[len(samples) // 4], 1e-9)


def figures(machine: Hardware) -> dict[str, str]:
    """Return every figure in words."""
    found = {}
    for name, value in machine.to_mapping().items():
        if isinstance(value, bool | str):
            found[name] = str(value)
        elif name.endswith("_bytes"):
            found[name] = short_bytes(value)
        elif name.endswith("seconds"):
            found[name] = f"{1e6 * value:,.1f} us"
        elif name == "matmul_flops":
            found[name] = f"{value / 1e12:,.3g} TFLOP/s"
        else:
            found[name] = f"{value:g}" if value < _MIB else f"{short_bytes(value)}/s"
    return found


def gather_seconds(collectives: Collectives, elements: int, device: torch.device) -> float:
    """Return the median time of a gather of ``elements`` in 16 bits over all ranks."""
    flat = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    shard = flat.chunk(collectives.world_size)[collectives.rank]
    seconds = []
    for _ in range(_GATHER_PASSES):
        dist.barrier()
        begin = time.perf_counter()
        collectives.gather(flat, shard, "gather", "measurement").wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def _measure_gathers(result: Path, nbytes: int) -> None:
    """Measure a large and a small gather; rank 0 writes bytes per second that a rank receives, and
    latency.
    """
    join_world(_TIMEOUT_SECONDS)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        kind = torch.accelerator.current_accelerator()
        device = torch.device(kind.type if kind is not None else "cpu", int(os.environ["LOCAL_RANK"]))
    collectives = make_collectives(None, _TIMEOUT_SECONDS, device)
    ranks = collectives.world_size
    elements = nbytes // 2 // ranks * ranks
    small = gather_seconds(collectives, _SMALL_ELEMENTS * ranks, device)
    large = gather_seconds(collectives, elements, device)
    received = 2 * (elements - _SMALL_ELEMENTS * ranks) * (ranks - 1) / ranks
    if collectives.rank == 0:
        found = {"bandwidth": received / max(large - small, 1e-9), "latency": small}
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _measure_gathers(Path(sys.argv[1]), int(sys.argv[2]))
