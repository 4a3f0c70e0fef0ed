"""``get_accelerator``: the device under DeepSpeed's questions, answered by torch.

``deepspeed.git_version_info``: what this DeepSpeed is and which of its operators are there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, MutableMapping
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.integrations.deepspeed.import_alias import module_for
from zero_ext.integrations.deepspeed.name_registry import names
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.zero.construction.build_units import accelerator_or_cpu

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_RENAMED = {  # what torch called it before
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


def _nothing(*_: object, **__: object) -> None:
    return None


def _no_block(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# Elsewhere these are what torch's module of the device has by the same name.
_ON_CPU: dict[str, Any] = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(("current_stream", "default_stream"), _nothing),
    **dict.fromkeys(("device", "stream"), _no_block),
    **dict.fromkeys(("Stream", "Event")),
    **dict.fromkeys(("is_available", "is_bf16_supported"), lambda: True),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        lambda device_index=None: resident_bytes(),
    ),
    "memory_stats": lambda device_index=None: {},
    "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
    "device_count": lambda: (
        int(os.environ.get("LOCAL_SIZE", "0")) or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
}


class DeepSpeedAccelerator:
    """The kind of device that models train on here, ``type`` like "cpu" or "cuda".

    Questions that torch's module of the device answers go there. On the CPU its number is the local rank,
    there are as many as local ranks, memory questions are about the process, and streams do nothing.
    """

    def __init__(self, type: str) -> None:
        self.type = type
        self._name = type

    def __repr__(self) -> str:
        return f"DeepSpeedAccelerator({self.type!r})"

    @property
    def _is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            kind = partial(torch.tensor, dtype=_TENSORS[name], device=self.type)
            return getattr(torch, name) if self._is_cpu else kind
        name = _RENAMED.get(name, name)
        if name not in _ON_CPU:
            raise AttributeError(f"the accelerator has no {name!r}; look at docs/reference/deepspeed_api.md")
        return _ON_CPU[name] if self._is_cpu else getattr(self._module, name)

    # -- which device -------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """Like "cuda:1"; without an index, and always on the CPU, the kind alone."""
        return self.type if self._is_cpu or device_index is None else f"{self.type}:{device_index}"

    def current_device_name(self) -> str:
        """Like "cuda:1" or "cpu"."""
        return self.device_name(None if self._is_cpu else self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self.type

    def communication_backend_name(self) -> str:
        """Return what torch.distributed is started with."""
        return "nccl" if self.type == "cuda" else "gloo"

    def is_synchronized_device(self) -> bool:
        """Return whether every call has been computed when it returns."""
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_current_stream_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # -- random numbers -----------------------------------------------------------------------------------

    def random(self) -> Any:
        """Torch's module of random functions."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the random state."""
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self._of(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the random state."""
        return torch.get_rng_state() if self._is_cpu else self._module.get_rng_state(self._of(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        """Torch's own generator of the device."""
        return torch.default_generator if self._is_cpu else self._module.default_generators[device_index]

    # -- memory -------------------------------------------------------------------------------------------

    def total_memory(self, device_index: int | None = None) -> int:
        """Return bytes of memory in all."""
        if self._is_cpu:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._module.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Return bytes of memory that are free."""
        if self._is_cpu:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in page-locked memory; itself on the CPU."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in page-locked memory."""
        return tensor.is_pinned()

    # -- dtypes and tools ---------------------------------------------------------------------------------

    def is_fp16_supported(self) -> bool:
        """Return True, as of fp64."""
        return True

    is_fp64_supported = is_fp16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that models may train in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def amp(self) -> Any:
        """Torch's module of mixed precision for the device."""
        return getattr(self._module, "amp", None)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Open a range in the profiler's trace; nothing on the CPU."""
        if self.type == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """Close it."""
        if self.type == "cuda":
            torch.cuda.nvtx.range_pop()

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose devices."""
        return [] if self._is_cpu else ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Write the devices to use into an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` when the device is initialized: now on the CPU."""
        return callback() if self._is_cpu else self._module._lazy_call(callback)

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder of that name in ``deepspeed.ops.op_builder``."""
        return getattr(module_for("deepspeed.ops.op_builder"), class_name)

    def create_op_builder(self, class_name: str) -> Any:
        """Return one of it. Raises ``DeepSpeedFeatureError`` for all but AsyncIOBuilder: nothing has to be
        built.
        """
        return self.get_op_builder(class_name)()

    def op_builder_dir(self) -> str:
        """Return the module that has the builders."""
        return "deepspeed.ops.op_builder"

    def is_triton_supported(self) -> bool:
        """Return whether Triton compiles for the device."""
        return self.type == "cuda" and torch.cuda.get_device_capability() >= (7, 0)

    def _of(self, device_index: int | None) -> Any:
        return self.type if device_index is None else device_index


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the device that models train on here."""
    return DeepSpeedAccelerator(accelerator_or_cpu().type)


def is_current_accelerator_supported() -> bool:
    """Return True: there is always one, if only the CPU."""
    return get_accelerator().is_available()


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return lists, tuples and dictionaries with their tensors on ``device``. Tensors for which
    ``criterion_func`` is true are moved in place."""

    def move(value: Any) -> Any:
        if criterion_func is None or not criterion_func(value):
            return value.to(device)
        value.data = value.to(device)
        return value

    return pytree.tree_map(move, item)


class _Operators(dict[str, bool]):
    def __missing__(self, name: str) -> bool:
        return False


version = names().version
git_hash = git_branch = "unknown"
accelerator_name = get_accelerator().type
# By DeepSpeed's names of its builders. Nothing has to be built for them; all others are False.
installed_ops = __compatible_ops__ = _Operators.fromkeys(
    ("async_io", *(name for traits in OPTIMIZERS.values() for name in traits.deepspeed_builders)), True
)
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
