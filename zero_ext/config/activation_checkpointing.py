"""Activation checkpointing: recompute a call from its inputs, or offload what autograd saves."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from zero_ext.config.base_section import ConfigSection, Count, KeyProblem, Names, Positive
from zero_ext.config.config_errors import show
from zero_ext.config.tiers import Tier, is_stored, other_tiers

_MIB = 2**20


class ActivationCheckpointingConfig(ConfigSection):
    """Storage of the tensors that calls of `zero_ext.checkpoint_activations(function, ...)` need in backward.

    The default is plain recomputation: the inputs stay in device memory.

    Attributes:
        mode: method of activation checkpointing. "recompute" stores the inputs of a call and runs its
            function again in backward. "offload_saved_tensors" stores the tensors that autograd saves inside
            the function in `tier` and recomputes nothing.
        tier: tier that stores the tensors: "device", "host" memory or "nvme".
        cpu_checkpointing: whether to use tier "host". This is DeepSpeed's name for it.
        nvme_paths: folders on NVMe devices. They are required by tier "nvme".
        partition_activations: whether each of the N ranks of `activation_group`, an argument of `prepare`,
            stores 1/N of the inputs (ZeRO, section 6.1). The ranks must have identical inputs, as in tensor
            parallelism. Inputs are compared across ranks in all calls until the first backward begins and in
            the first call after each backward, and those of all other calls when the next backward begins.
        contiguous_memory_optimization: whether stored inputs share one buffer. The buffer is allocated once,
            with `number_checkpoints` times the bytes of the first call.
        number_checkpoints: largest number of calls with inputs stored simultaneously. It is required by
            contiguous_memory_optimization.
        synchronize_checkpoint_boundary: whether to wait for the device before and after each call and each
            recomputation.
        profile: whether to publish how long offloading, fetching and recomputing take.
        prefetch: number of stored calls that are fetched ahead of their use in backward.
        save_ops: names of ops, such as "aten.mm". Their results are saved on the device and not recomputed.
        save_budget_bytes: bytes of results that each call may save on the device. The first run of the call
            is timed, and the results that save the most time per byte are chosen.
        min_offload_bytes: size in bytes below which a tensor is neither offloaded nor partitioned.
        buffer_bytes: size in bytes of the staging memory for transfers to and from NVMe. It is independent of
            the model and of the number of calls.
    """

    mode: Literal["recompute", "offload_saved_tensors"] = "recompute"
    tier: Tier = "device"
    cpu_checkpointing: bool = False
    nvme_paths: Names = ()
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Positive | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    prefetch: Count = 1
    save_ops: Names = ()
    save_budget_bytes: Positive | None = None
    min_offload_bytes: Count = 1024
    buffer_bytes: Annotated[Positive, Field(ge=_MIB)] = 32 * _MIB

    @property
    def storage_tier(self) -> Tier:
        """Return the tier that stores the tensors, under either key."""
        return "host" if self.cpu_checkpointing else self.tier

    @property
    def moves(self) -> bool:
        """Return whether stored tensors leave the memory that they were computed in."""
        return (
            self.storage_tier != "device" or self.partition_activations or self.contiguous_memory_optimization
        )

    @model_validator(mode="after")
    def _tier_is_one(self) -> ActivationCheckpointingConfig:
        if self.cpu_checkpointing and is_stored(self.tier):
            raise KeyProblem(
                "cpu_checkpointing",
                "expected false with tier 'nvme', got True, which means 'host'. Remove one of the two.",
            )
        if is_stored(self.tier) and not self.nvme_paths:
            raise KeyProblem(
                "nvme_paths",
                "expected a folder with tier 'nvme', got none. Name at least one folder on an NVMe device.",
            )
        if self.nvme_paths and not is_stored(self.tier):
            raise KeyProblem(
                "nvme_paths",
                f"got {show(list(self.nvme_paths))}, which has no effect: tier is {show(self.storage_tier)}. "
                "Remove it or set tier to 'nvme'.",
            )
        if len({PurePath(path) for path in self.nvme_paths}) < len(self.nvme_paths):
            raise KeyProblem(
                "nvme_paths", f"got {show(list(self.nvme_paths))}, with duplicates. Name each folder once."
            )
        return self

    @model_validator(mode="after")
    def _sizes_have_an_effect(self) -> ActivationCheckpointingConfig:
        moves = f"tensors stay where they are. Remove it or set tier to {other_tiers()}"
        stored = f"tier is {show(self.storage_tier)}. Remove it or set tier to 'nvme'"
        for name, effective, why in (
            ("prefetch", self.moves, moves),
            ("min_offload_bytes", self.moves, moves),
            ("buffer_bytes", is_stored(self.storage_tier), stored),
        ):
            value = getattr(self, name)
            if not effective and value != type(self).model_fields[name].default:
                raise KeyProblem(name, f"got {show(value)}, which has no effect. {why}.")
        return self

    @model_validator(mode="after")
    def _buffer_has_a_size(self) -> ActivationCheckpointingConfig:
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            raise KeyProblem(
                "number_checkpoints",
                "expected a number with contiguous_memory_optimization true, got none. The buffer "
                "stores the inputs of so many calls. Set it to the number of calls of a forward pass.",
            )
        if self.number_checkpoints is not None and not self.contiguous_memory_optimization:
            raise KeyProblem(
                "number_checkpoints",
                f"got {self.number_checkpoints}, which has no effect: it sizes the buffer of "
                "contiguous_memory_optimization. Remove it or set that to true.",
            )
        if self.contiguous_memory_optimization and is_stored(self.tier):
            raise KeyProblem(
                "contiguous_memory_optimization",
                "expected false with tier 'nvme', where extents need no memory, got True. Set it to false, "
                "or tier to 'device' or 'host'.",
            )
        return self

    @model_validator(mode="after")
    def _saved_tensors_are_moved_only(self) -> ActivationCheckpointingConfig:
        if self.mode == "recompute":
            if self.save_ops and self.save_budget_bytes is not None:
                raise KeyProblem(
                    "save_budget_bytes",
                    f"expected null alongside save_ops, got {self.save_budget_bytes}. Give one of the two.",
                )
            return self
        if self.storage_tier == "device":
            raise KeyProblem(
                "tier",
                f"expected {other_tiers()} with mode 'offload_saved_tensors', got 'device'. Set tier to "
                f"{other_tiers()}.",
            )
        for name in (
            "partition_activations",
            "contiguous_memory_optimization",
            "save_ops",
            "save_budget_bytes",
        ):
            if getattr(self, name):
                raise KeyProblem(
                    name,
                    f"got {show(getattr(self, name))}, which has no effect: it acts on recomputation, and "
                    "mode is 'offload_saved_tensors'. Remove it.",
                )
        return self
