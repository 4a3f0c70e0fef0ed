"""The stand-in accelerator under torch's names: the device ``stand_in`` and its module ``torch.stand_in``."""

from __future__ import annotations

import types

import torch

from tests.accelerator import device_module
from tests.accelerator.build import library

NAME = "stand_in"


def is_enabled() -> bool:
    """Whether this process has the device."""
    return torch._C._get_privateuse1_backend_name() == NAME


def enable() -> types.ModuleType:
    """Makes ``stand_in`` this process's accelerator, for good, and returns its device module.

    To be called before the process's first backward: autograd starts a thread for each device then and never
    again.
    """
    if is_enabled():
        return getattr(torch, NAME)
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return device_module
