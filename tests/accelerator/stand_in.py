"""The stand-in accelerator under torch's names: the device ``stand_in``, its module ``torch.stand_in`` and
the backend of its process groups."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path

import torch
import torch.distributed as dist

from tests.accelerator import device_module
from tests.accelerator.build import library

NAME = "stand_in"
BACKEND = "stand_in_ccl"  # of its collectives, for tensors on it alone
SOURCES = Path(__file__).resolve().parents[2] / "csrc"
# Kernels of the library's that the device does not have.
_refusals = torch.library.Library("zero_ext", "IMPL", "PrivateUse1")


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
    _refuse_host_ops()
    dist.Backend.register_backend(BACKEND, module.make_process_group, devices=[NAME])
    return device_module


def _registered(folder: str, block: str, name: str) -> set[str]:
    """The ops that the sources in `folder` name in blocks of that pattern."""
    sources = (path.read_text() for path in (SOURCES / folder).rglob("*.c*"))
    blocks = (found for text in sources for found in re.findall(block, text, re.DOTALL))
    return {found for each in blocks for found in re.findall(name, each)}


def _host_only_ops() -> set[str]:
    """Ops that have a kernel for the CPU alone."""
    cuda = _registered("cuda", r"IMPL\(zero_ext, CUDA, library\) \{(.*?)\}\n", r'library\.impl\("(\w+)"')
    return _registered("ops", r"ZERO_EXT_OPS\(CPU\) \{(.*?)\n\}\n", r'ops\(\s*"(\w+)\(') - cuda


def _refuse_host_ops() -> None:
    """Refuses what CUDA refuses, too: ops of the library's that have a kernel for the CPU alone.

    Torch's own ops run on the CPU's kernels, by a fallback that would also serve these.
    """
    for name in sorted(_host_only_ops()):

        def refuse(*_: object, name: str = name) -> None:
            raise NotImplementedError(f"zero_ext::{name}: expected tensors of the CPU, got some of a device.")

        _refusals.impl(name, refuse)
