"""Machines by name. Sizes are those of data sheets; rates are what programs reach.

``docs/explanation/simulation.md`` lists their sources, the published runs that some were fitted to, and the
runs that they are checked against.
"""

from __future__ import annotations

from zero_ext.plan.simulation.hardware import Hardware

GIB = 2**30
TB = 10**12

# Sixteen V100-32GB; matrix efficiency fitted to Megatron-LM's 1.2B on one of them (arXiv 1909.08053).
_DGX2 = Hardware(
    name="dgx2-v100",
    ranks_per_node=16,
    matmul_flops=125e12,
    matmul_efficiency=0.415,
    device_bytes=32 * GIB,
    device_bandwidth=0.8e12,
    unit_seconds=2e-4,
    host_bytes=int(1.5 * TB),
    host_bandwidth=110e9,
    to_host=12e9,
    to_device=12e9,
    node_to_host=48e9,
    node_to_device=48e9,
    nvme_bytes=28 * TB,
    nvme_read=25.6e9,
    nvme_write=25.6e9,
    intra_bandwidth=120e9,
    inter_bandwidth=80e9,
    collective_seconds=3e-5,
    per_node_seconds=5e-6,
)
# Eight A100-80GB of Azure's NDm A100 v4; matrix efficiency fitted to DeepSpeed's 530B on 1,024 of them.
_A100 = _DGX2.replace(
    name="dgx-a100",
    ranks_per_node=8,
    matmul_flops=312e12,
    matmul_efficiency=0.588,
    device_bytes=80 * GIB,
    device_bandwidth=1.6e12,
    unit_seconds=1.5e-4,
    host_bytes=int(1.7 * TB),
    host_bandwidth=250e9,
    to_host=24e9,
    to_device=24e9,
    node_to_host=96e9,
    node_to_device=96e9,
    nvme_bytes=7 * TB,
    nvme_read=20e9,
    nvme_write=15e9,
    intra_bandwidth=230e9,
    inter_bandwidth=160e9,
)
# Held against nothing yet: no published run of this kind was at hand.
_H200 = _A100.replace(
    name="dgx-h200",
    matmul_flops=989e12,
    matmul_efficiency=0.6,
    device_bytes=141 * 10**9,
    device_bandwidth=4.0e12,
    unit_seconds=1e-4,
    host_bytes=2 * TB,
    host_bandwidth=400e9,
    to_host=50e9,
    to_device=50e9,
    node_to_host=300e9,
    node_to_device=300e9,
    nvme_bytes=28 * TB,
    nvme_read=40e9,
    nvme_write=25e9,
    intra_bandwidth=370e9,
    inter_bandwidth=320e9,
)
_H100 = _H200.replace(name="dgx-h100", device_bytes=80 * GIB, device_bandwidth=2.8e12)

MACHINES = {machine.name: machine for machine in (_DGX2, _A100, _H100, _H200)}
"""Machines by name."""


def machine_named(name: str) -> Hardware:
    """Return a machine by name or file.

    Args:
        name: a key of `MACHINES`, or the path of a JSON file that ends in .json.

    Returns:
        The machine.

    Raises:
        ValueError: there is no such machine; names those there are.
    """
    if name in MACHINES:
        return MACHINES[name]
    if name.endswith(".json"):
        return Hardware.load(name)
    raise ValueError(
        f"machine: expected one of {', '.join(MACHINES)} or a path ending in .json, got {name!r}. Choose "
        "one of them."
    )
