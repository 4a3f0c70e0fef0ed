"""The stand-in accelerator under torch's names: ``enable()`` makes the device ``stand_in`` and ``torch.stand_in``."""

from __future__ import annotations

import types

import torch

from tests.accelerator.build import library

NAME = "stand_in"


def enable() -> types.ModuleType:
    """Makes ``stand_in`` this process's accelerator, for good, and returns its device module.

    To be called before the process's first backward: autograd starts a thread for each device then and never
    again.
    """
    if torch._C._get_privateuse1_backend_name() == NAME:
        return getattr(torch, NAME)
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _device_module() -> types.ModuleType:
    from tests.accelerator import device_module

    return device_module
