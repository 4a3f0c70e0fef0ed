"""The stand-in accelerator under torch's names: the device ``stand_in``, its module ``torch.stand_in`` and
the backend of its process groups."""

from __future__ import annotations

import importlib.util
import types

import torch
import torch.distributed as dist

from tests.accelerator import device_module
from tests.accelerator.build import library

NAME = "stand_in"
BACKEND = "stand_in_ccl"  # of its collectives, for tensors on it alone


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
    built = library()
    torch.ops.load_library(built)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    spec = importlib.util.spec_from_file_location(NAME, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.Backend.register_backend(BACKEND, module.make_process_group, devices=[NAME])
    return device_module
