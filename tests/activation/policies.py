"""Every way of keeping calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.activation.blocks import WIDTH
from zero_ext.activation import ActivationCheckpointing
from zero_ext.config import ActivationCheckpointingConfig

POLICIES: dict[str, dict[str, Any]] = {
    "recompute": {},
    "host": {"tier": "host"},
    "host, far ahead": {"cpu_checkpointing": True, "prefetch": 3},
    "host, nothing ahead": {"tier": "host", "prefetch": 0},
    "nvme": {"tier": "nvme"},
    "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 4},
    "contiguous host": {"contiguous_memory_optimization": True, "number_checkpoints": 4, "tier": "host"},
    "ops kept": {"save_ops": ("aten.addmm", "aten.tanh.default"), "tier": "host"},
    "budget": {"save_budget_bytes": 24 * 2 * WIDTH * 4},
    "saved tensors, host": {"mode": "offload_saved_tensors", "tier": "host"},
    "saved tensors, nvme": {"mode": "offload_saved_tensors", "tier": "nvme"},
    "profiled": {"tier": "host", "profile": True, "synchronize_checkpoint_boundary": True},
}


def made(name: str, folder: Path, **more: Any) -> ActivationCheckpointing:
    """The policy ``name``, without a lower bound of size."""
    values = {**POLICIES[name], **more}
    if values.get("tier") == "nvme":
        values |= {"nvme_paths": (str(folder),), "buffer_bytes": 2**20}
    policy = ActivationCheckpointingConfig(**values)
    return ActivationCheckpointing(policy.replace(min_offload_bytes=0) if policy.moves else policy)
