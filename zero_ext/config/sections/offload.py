"""The tier of the shards of each state kind, and the path of bytes to NVMe. Default: the device."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from zero_ext.config.schema.base_section import ConfigSection, Count, KeyProblem, Names, Positive
from zero_ext.config.schema.config_errors import show

Tier = Literal["device", "host", "nvme"]
"""Where state is stored."""
KINDS = ("params", "grads", "optimizer")
_PAGE = 4096
_MIB = 2**20


class AioConfig(ConfigSection):
    """Settings of files on NVMe devices; acts only where a tier is "nvme".

    Attributes:
        backend: which interface of the kernel carries the transfers; "auto" takes the first that this
            machine offers, in the order io_uring, libaio, threads.
        queue_depth: most blocks in flight simultaneously per I/O thread.
        block_bytes: longest single transfer in bytes; longer ones are split.
        io_threads: threads that hand blocks to the kernel, each with a queue of its own.
        gpu_direct_storage: "auto" has parameters and gradients on NVMe reach a GPU's memory, and leave it, by
            NVIDIA's cuFile library (GPUDirect Storage) without pinned host memory on the way, where the
            library is there and a trial transfer at set-up succeeds; elsewhere, and with
            `offload.checksum`, a log line says why they do not. "off" never tries.
    """

    backend: Literal["auto", "io_uring", "libaio", "threads"] = "auto"
    queue_depth: Annotated[Positive, Field(le=1024)] = 32
    block_bytes: Annotated[Positive, Field(ge=_PAGE, multiple_of=_PAGE)] = _MIB
    io_threads: Annotated[Positive, Field(le=16)] = 1
    gpu_direct_storage: Literal["off", "auto"] = "off"


class OffloadConfig(ConfigSection):
    """Tiers of the state kinds.

    "host" for optimizer and gradients is ZeRO-Offload (Ren et al., arXiv 2101.06840), "nvme" is ZeRO-Infinity
    (Rajbhandari et al., arXiv 2104.07857). Only a kind that is sharded can leave the device, so the stage
    decides which may.

    Attributes:
        params: where parameter shards live; other than "device" needs stage 3.
        grads: where gradient shards live; other than "device" needs stage 2 or 3.
        optimizer: where master weights and the optimizer's state live, and are updated; other than "device"
            needs stage 1, 2 or 3.
        ratio: largest fraction of the optimizer's elements that lives in its tier; the other units keep
            optimizer and gradients on the device, as in Twin-Flow (DeepSpeed's offload_optimizer.ratio).
            Units are not split, so the fraction is met from below.
        nvme_paths: folders on the NVMe devices, required where a tier is "nvme"; data is striped over them.
        staging_buffer_bytes: bytes of the buffer through which an optimizer step streams state from another
            tier. It does not depend on the model.
        update_mode: when a unit's update runs. "after_backward": all of them in `optimizer.step()`.
            "in_backward": each as soon as its gradients are reduced in the last backward pass of a step.
            Without gradient clipping and loss scaling, and with one micro-batch a step, its gradient's memory
            is then free again, so gradients of the whole model never exist. With clipping or loss scaling the
            update is speculative, and rolled back exactly if they apply (as in SuperOffload,
            arXiv 2509.21271). Master weights and the optimizer's state then take twice the memory.
            "delayed": alongside the forward and backward of the next step, which use the parameters from
            before them (one-step delayed parameter update, ZeRO-Offload). The optimizer is on "host" or
            "nvme".
        delay_start_step: steps at the start with an update that is not delayed, with update_mode "delayed".
        checksum: keep a CRC32C of everything written to NVMe and verify it at every read.
    """

    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"
    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    nvme_paths: Names = ()
    staging_buffer_bytes: Annotated[Positive, Field(ge=_MIB, multiple_of=_PAGE)] = 64 * _MIB
    update_mode: Literal["after_backward", "in_backward", "delayed"] = "after_backward"
    delay_start_step: Count = 0
    checksum: bool = False

    @property
    def any_nvme(self) -> bool:
        """Return whether any state kind lives on NVMe."""
        return bool(self._on_nvme())

    def of_params_alone(self) -> OffloadConfig:
        """Return the same for a model without an optimizer, which has no other state kind.

        Returns:
            A new section.
        """
        paths = self.nvme_paths if self.params == "nvme" else ()
        return self.replace(grads="device", optimizer="device", ratio=1.0, nvme_paths=paths)

    @model_validator(mode="after")
    def _ratio_splits_something(self) -> OffloadConfig:
        if self.ratio < 1 and self.optimizer == "device":
            raise KeyProblem(
                "ratio",
                f"got {show(self.ratio)}, which has no effect: the optimizer is stored on 'device'. Remove "
                "it or set optimizer to 'host' or 'nvme'.",
            )
        return self

    @model_validator(mode="after")
    def _paths_fit_the_tiers(self) -> OffloadConfig:
        on_nvme = self._on_nvme()
        if on_nvme and not self.nvme_paths:
            raise KeyProblem(
                "nvme_paths",
                f"expected a folder with {' and '.join(on_nvme)} on 'nvme', got none. "
                "Name at least one folder on an NVMe device.",
            )
        if self.nvme_paths and not on_nvme:
            raise KeyProblem(
                "nvme_paths",
                f"got {show(list(self.nvme_paths))}, which has no effect: nothing is stored on 'nvme'. "
                f"Remove it or set {', '.join(KINDS[:-1])} or {KINDS[-1]} to 'nvme'.",
            )
        seen: dict[PurePath, int] = {}
        for index, path in enumerate(self.nvme_paths):
            if "\0" in path:
                raise KeyProblem(
                    f"nvme_paths.{index}", f"expected a path without NUL, got {show(path)}. Correct the path."
                )
            first = seen.setdefault(PurePath(path), index)
            if first != index:
                raise KeyProblem(
                    f"nvme_paths.{index}",
                    f"got {show(path)}, the same folder as nvme_paths.{first}. Name each folder once.",
                )
        return self

    @model_validator(mode="after")
    def _only_the_host_delays(self) -> OffloadConfig:
        if self.update_mode == "delayed" and self.optimizer == "device":
            raise KeyProblem(
                "update_mode",
                "expected the optimizer on 'host' or 'nvme' for 'delayed', got 'device', where the update "
                "would delay forward and backward. Set optimizer to 'host' or 'nvme', or update_mode to "
                "'after_backward'.",
            )
        if self.delay_start_step and self.update_mode != "delayed":
            raise KeyProblem(
                "delay_start_step",
                f"got {self.delay_start_step}, which has no effect: update_mode is {show(self.update_mode)}. "
                "Remove it or set update_mode to 'delayed'.",
            )
        return self

    def _on_nvme(self) -> list[str]:
        return [kind for kind in KINDS if getattr(self, kind) == "nvme"]
