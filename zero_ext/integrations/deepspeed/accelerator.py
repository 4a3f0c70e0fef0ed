"""``get_accelerator``: the device under DeepSpeed's questions, answered by torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, MutableMapping
from functools import cache, partial
from typing import Any

import torch

from zero_ext.integrations.deepspeed.refused import module_for, names_of
from zero_ext.monitor.memory import resident_bytes
from zero_ext.zero.construction import accelerator_or_cpu

_TENSORS = {
    f"{kind}Tensor": dtype
    for kind, dtype in {
        "BFloat16": torch.bfloat16,
        "Byte": torch.uint8,
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "Int": torch.int32,
        "Long": torch.int64,
    }.items()
}
_MEMORY = {
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "memory_cached": "memory_reserved",  # what torch called it before
    "max_memory_cached": "max_memory_reserved",
    "memory_stats": "memory_stats",
}


class DeepSpeedAccelerator:
    """The kind of device that models train on here, ``type`` like "cpu" or "cuda".

    On the CPU memory questions are about the process, and streams do nothing.
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

    # -- which device -------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether there is such a device."""
        return self._is_cpu or bool(self._module.is_available())

    def device_name(self, device_index: int | None = None) -> str:
        """Like "cuda:1"; without an index, and always on the CPU, the kind alone."""
        return self.type if self._is_cpu or device_index is None else f"{self.type}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context that makes the device current."""
        return contextlib.nullcontext() if self._is_cpu else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Makes a device current."""
        if not self._is_cpu:
            self._module.set_device(device_index)

    def current_device(self) -> Any:
        """Number of the current device; on the CPU the local rank."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self._is_cpu else self._module.current_device()

    def current_device_name(self) -> str:
        """Like "cuda:1" or "cpu"."""
        return self.device_name(None if self._is_cpu else self.current_device())

    def device_count(self) -> int:
        """Number of devices; on the CPU that of local ranks, from LOCAL_SIZE or torchrun's variable."""
        if not self._is_cpu:
            return int(self._module.device_count())
        return int(os.environ.get("LOCAL_SIZE", "0")) or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this kind of device."""
        return tensor.device.type == self.type

    def communication_backend_name(self) -> str:
        """What torch.distributed is started with."""
        return "nccl" if self.type == "cuda" else "gloo"

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the device."""
        if not self._is_cpu:
            self._module.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether every call has been computed when it returns."""
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # -- random numbers -----------------------------------------------------------------------------------

    def random(self) -> Any:
        """Torch's module of random functions."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seeds the current device."""
        return torch.manual_seed(seed) if self._is_cpu else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seeds all devices."""
        return torch.manual_seed(seed) if self._is_cpu else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """The seed."""
        return int(torch.initial_seed() if self._is_cpu else self._module.initial_seed())

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets the random state."""
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, self._of(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The random state."""
        return torch.get_rng_state() if self._is_cpu else self._module.get_rng_state(self._of(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        """Torch's own generator of the device."""
        return torch.default_generator if self._is_cpu else self._module.default_generators[device_index]

    # -- streams ------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """Class of streams; None on the CPU."""
        return None if self._is_cpu else self._module.Stream

    @property
    def Event(self) -> Any:
        """Class of events; None on the CPU."""
        return None if self._is_cpu else self._module.Event

    def stream(self, stream: Any) -> Any:
        """A context that makes the stream current."""
        return contextlib.nullcontext() if self._is_cpu else self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream; None on the CPU."""
        return None if self._is_cpu else self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream; None on the CPU."""
        return None if self._is_cpu else self._module.default_stream(device_index)

    # -- memory -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _TENSORS:
            return partial(torch.tensor, dtype=_TENSORS[name], device=self.current_device_name())
        if name not in _MEMORY:
            raise AttributeError(f"the accelerator has no {name!r}; look at docs/deepspeed_api.md")
        if not self._is_cpu:
            return getattr(self._module, _MEMORY[name])
        return lambda device_index=None: {} if name == "memory_stats" else resident_bytes()

    def empty_cache(self) -> None:
        """Gives cached memory back."""
        if not self._is_cpu:
            self._module.empty_cache()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Counts peaks from now on; nothing on the CPU."""
        if not self._is_cpu:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory in all."""
        if self._is_cpu:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._module.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory that are free."""
        if self._is_cpu:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(self._module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory; itself on the CPU."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory."""
        return tensor.is_pinned()

    # -- dtypes and tools ---------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes."""
        return self._is_cpu or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether fp64 computes."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that models may train in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def amp(self) -> Any:
        """Torch's module of mixed precision for the device."""
        return getattr(self._module, "amp", None)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Opens a range in the profiler's trace; nothing on the CPU."""
        if self.type == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """Closes it."""
        if self.type == "cuda":
            torch.cuda.nvtx.range_pop()

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that choose devices."""
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
        """The builder of that name in ``deepspeed.ops.op_builder``."""
        return getattr(module_for("deepspeed.ops.op_builder"), class_name)

    def create_op_builder(self, class_name: str) -> Any:
        """One of it. Raises ``DeepSpeedFeatureError`` for all but AsyncIOBuilder: nothing has to be built."""
        return self.get_op_builder(class_name)()

    def op_builder_dir(self) -> str:
        """The module that has the builders."""
        return "deepspeed.ops.op_builder"

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the device."""
        return self.type == "cuda" and torch.cuda.get_device_capability() >= (7, 0)

    def _of(self, device_index: int | None) -> Any:
        return self.type if device_index is None else device_index


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The device that models train on here."""
    return DeepSpeedAccelerator(accelerator_or_cpu().type)


def is_current_accelerator_supported() -> bool:
    """True: there is always one, if only the CPU."""
    return get_accelerator().is_available()


__getattr__ = names_of("deepspeed.accelerator")
