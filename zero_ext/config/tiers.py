"""The tiers that store state. Configurations, steps, plans and reports follow from this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from zero_ext.config.base_section import KeyOf, one_of
from zero_ext.config.buffer_sizes import ALIGNMENT_BYTES, STORAGE_ALIGNMENT


@dataclass(frozen=True)
class StorageTier:
    """A tier that stores state.

    Args:
        name: name in configurations.
        short: name in tables.
        words: name in sentences.
        memory: memory in which steps use its values in place. None: its values are in files, and transfers
            copy them.
        deepspeed: name in DeepSpeed's JSON, empty if there is none.
        allocate: returns a zeroed uint8 tensor of that many bytes, aligned to whole pages. None: the tier has
            no memory of its own kind.
    """

    name: str
    short: str
    words: str
    memory: Literal["device", "host"] | None = "host"
    deepspeed: str = ""
    allocate: Callable[[int], Any] | None = None

    @property
    def near(self) -> Literal["device", "host"]:
        """Return the memory in which steps use its values, in place or copied."""
        return self.memory or "host"

    @property
    def capacity(self) -> str:
        """Return the tier in ``CAPACITIES`` that it takes space and bandwidth from."""
        return self.memory or "nvme"

    @property
    def alignment(self) -> int:
        """Return the alignment of shards, in bytes."""
        return ALIGNMENT_BYTES if self.memory else STORAGE_ALIGNMENT


TIERS = {
    tier.name: tier
    for tier in (
        StorageTier("device", "GPU", "GPU memory", "device", deepspeed="none"),
        StorageTier("host", "host", "host memory", deepspeed="cpu"),
        StorageTier("nvme", "NVMe", "NVMe", memory=None, deepspeed="nvme"),
    )
}
"""All tiers by name, from the fastest to the slowest."""

CAPACITIES = tuple(TIERS)
"""The tiers with a size and a bandwidth in the description of a machine."""

Tier = Annotated[str, KeyOf(TIERS)]
"""The name of a tier."""


def register_tier(tier: StorageTier) -> None:
    """Add a tier in host memory, so that configurations can name it. It counts as the slowest one.

    Raises:
        ValueError: Another tier has the name, or it does not allocate host memory.
    """
    if TIERS.get(tier.name, tier) != tier or tier.memory != "host" or tier.allocate is None:
        raise ValueError(
            f"tier: expected a new name, memory 'host' and a function that allocates, got {tier}. Correct it."
        )
    TIERS[tier.name] = tier


def is_stored(*tiers: Tier) -> bool:
    """Return whether any of ``tiers`` keeps its values in files, where every transfer may fail."""
    return any(TIERS[tier].memory is None for tier in tiers)


def share_memory(one: Tier, other: Tier) -> bool:
    """Return whether steps use the values of both tiers in the same memory, or both only copied."""
    return TIERS[one].memory == TIERS[other].memory


def other_tiers() -> str:
    """Return the names of all tiers but the device, as errors list them."""
    return one_of(tuple(TIERS)[1:])


def distance_from_device(tiers: Iterable[Tier]) -> int:
    """Return how many tiers state lies from the device, summed over all ``tiers``."""
    return sum(map(list(TIERS).index, tiers))
