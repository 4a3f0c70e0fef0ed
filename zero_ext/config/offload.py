"""The tier of each state kind, and whether it is sharded. A ZeRO stage is a named preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from zero_ext.config.base_section import ConfigSection, Count, KeyProblem, Names, Positive
from zero_ext.config.config_errors import show
from zero_ext.config.tiers import Tier, is_stored, other_tiers

KINDS = ("params", "grads", "optimizer")
_PAGE = 4096
_MIB = 2**20


class AioConfig(ConfigSection):
    """I/O settings for files on NVMe devices, which apply only if a tier is "nvme".

    Attributes:
        backend: I/O interface for transfers. "auto" selects the first that the machine supports, in the order
            io_uring, libaio, threads.
        queue_depth: largest number of blocks in flight per I/O thread.
        block_bytes: largest size of a single transfer, in bytes. Longer transfers are split.
        io_threads: number of threads that submit blocks to the kernel, each with its own queue.
        gpu_direct_storage: use of NVIDIA's cuFile library (GPUDirect Storage) for parameters and gradients on
            NVMe. "auto" transfers them between NVMe and GPU memory without pinned host memory in between, if
            the library is installed and a trial transfer at set-up succeeds. Otherwise, and with
            `offload.checksum`, they pass through host memory and a log line gives the reason.
    """

    backend: Literal["auto", "io_uring", "libaio", "threads"] = "auto"
    queue_depth: Annotated[Positive, Field(le=1024)] = 32
    block_bytes: Annotated[Positive, Field(ge=_PAGE, multiple_of=_PAGE)] = _MIB
    io_threads: Annotated[Positive, Field(le=16)] = 1
    gpu_direct_storage: Literal["off", "auto"] = "off"


class OffloadConfig(ConfigSection):
    """Tiers of the state kinds.

    "host" for optimizer and gradients is ZeRO-Offload (Ren et al., arXiv 2101.06840), "nvme" is ZeRO-Infinity
    (Rajbhandari et al., arXiv 2104.07857). Only sharded state can leave the device, so the stage
    determines which kinds may.

    Attributes:
        params: tier that stores parameter shards. Tiers other than "device" require stage 3.
        grads: tier that stores gradient shards. Tiers other than "device" require stage 2 or 3.
        optimizer: tier that stores and updates master weights and optimizer state. Tiers other than "device"
            require stage 1, 2 or 3.
        ratio: largest fraction of the optimizer's elements that is stored in its tier. The remaining units
            keep optimizer state and gradients on the device, as in Twin-Flow (DeepSpeed's
            offload_optimizer.ratio). Units are not split, so the actual fraction may be smaller.
        nvme_paths: folders on NVMe devices over which data is striped. They are required if a tier is "nvme".
        staging_buffer_bytes: size in bytes of the buffer through which an optimizer step streams state from
            another tier. It is independent of the model size.
        update_mode: time at which the optimizer updates units. "after_backward" updates all units in
            `optimizer.step()`. "in_backward" updates each unit as soon as its gradients are reduced in the
            last backward pass of a step. The gradient memory of the unit is then released, if there is one
            micro-batch per step and neither gradient clipping nor loss scaling, so the gradients of the full
            model are never allocated simultaneously. The update is speculative with clipping or loss scaling:
            it is rolled back exactly if they apply (as in SuperOffload, arXiv 2509.21271), and master weights
            and optimizer state take twice the memory. "delayed" overlaps the update with the forward and
            backward of the next step, which use the parameters from before the update (one-step delayed
            parameter update, ZeRO-Offload), and requires the optimizer on "host" or "nvme".
        delay_start_step: number of initial steps with an update that is not delayed. It requires update_mode
            "delayed".
        checksum: whether to store a CRC32C of all data written to NVMe and to verify it at every read.
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
        """Return whether any state kind is stored on NVMe."""
        return is_stored(self.params, self.grads, self.optimizer)

    def of_params_alone(self) -> OffloadConfig:
        """Return the section for a model without an optimizer, which has only parameters.

        Returns:
            A new section.
        """
        paths = self.nvme_paths if is_stored(self.params) else ()
        return self.replace(grads="device", optimizer="device", ratio=1.0, nvme_paths=paths)

    @model_validator(mode="after")
    def _ratio_splits_something(self) -> OffloadConfig:
        if self.ratio < 1 and self.optimizer == "device":
            raise KeyProblem(
                "ratio",
                f"got {show(self.ratio)}, which has no effect: the optimizer is stored on 'device'. Remove "
                f"it or set optimizer to {other_tiers()}.",
            )
        return self

    @model_validator(mode="after")
    def _paths_fit_the_tiers(self) -> OffloadConfig:
        on_nvme = [kind for kind in KINDS if is_stored(getattr(self, kind))]
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
                f"expected the optimizer on {other_tiers()} for 'delayed', got 'device', where the update "
                f"would delay forward and backward. Set optimizer to {other_tiers()}, or update_mode to "
                "'after_backward'.",
            )
        if self.delay_start_step and self.update_mode != "delayed":
            raise KeyProblem(
                "delay_start_step",
                f"got {self.delay_start_step}, which has no effect: update_mode is {show(self.update_mode)}. "
                "Remove it or set update_mode to 'delayed'.",
            )
        return self


@dataclass(frozen=True)
class StatePlacement:
    """The state kinds that are sharded over the ranks (ZeRO, Rajbhandari et al. 2020, section 5), and in
    which tier the shards are (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1). Replicated kinds are on
    the device.
    """

    params: bool
    grads: bool
    optimizer: bool
    params_tier: Tier = "device"
    grads_tier: Tier = "device"
    optimizer_tier: Tier = "device"

    @staticmethod
    def of_stage(stage: int) -> StatePlacement:
        """Return the preset of ZeRO stage 0, 1, 2 or 3; anything else raises ``ValueError``."""
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: expected a ZeRO stage 0, 1, 2 or 3, got {stage!r}. Choose one of them.")
        return StatePlacement(params=stage >= 3, grads=stage >= 2, optimizer=stage >= 1)

    def on_tiers(self, policy: OffloadConfig) -> StatePlacement:
        """Return the same with every kind in the tier that ``policy`` names."""
        return replace(
            self, params_tier=policy.params, grads_tier=policy.grads, optimizer_tier=policy.optimizer
        )

    def optimizer_on_device(self) -> StatePlacement:
        """Return the same with optimizer and gradients on the device."""
        return replace(self, grads_tier="device", optimizer_tier="device")

    def persistent(self) -> StatePlacement:
        """Return the same with replicated parameters: for units too small to be worth gathering."""
        return replace(self, params=False, params_tier="device")

    def consuming_gradients(self, world_size: int) -> StatePlacement:
        """Return the same where a unit's gradient is used up by its update in backward: it is not replicated
        for longer than its reduction unless a replicated optimizer needs it."""
        return replace(self, grads=self.grads or self.optimizer or world_size == 1)

    def on_ranks(self, world_size: int) -> StatePlacement:
        """Return what remains of it on ``world_size`` ranks: a single rank's shard is the whole, and is a
        shard in its own right only if it lies elsewhere than on the device. The optimizer works on the
        parameters' shards where there are any.
        """
        if world_size > 1:
            return self
        return replace(
            self,
            params=self.params_tier != "device",
            grads=self.grads_tier != "device",
            optimizer={self.optimizer_tier, self.params_tier} != {"device"},
        )
