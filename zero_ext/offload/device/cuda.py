"""Queries and calls of CUDA alone. Everything else goes through ``torch.accelerator``."""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process


def register(pointer: int, nbytes: int) -> None:
    """Pin host memory in place. ``RuntimeError`` with the driver's number if it refuses."""
    error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _PORTABLE))
    if error:
        raise RuntimeError(
            f"cudaHostRegister: the driver refused to lock the memory. Look up its error code {error}"
        )


def unregister(pointer: int) -> None:
    """End :func:`register`."""
    torch.cuda.cudart().cudaHostUnregister(pointer)


def pci_address(device: torch.device) -> str:
    """Return where the device is on the PCI bus, as the kernel writes it (domain:bus:device.function); empty
    where torch does not report it.
    """
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):
        return ""
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
