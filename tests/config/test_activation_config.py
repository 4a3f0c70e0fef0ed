"""The section activation_checkpointing: what contradicts itself or has no effect is refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from zero_ext.config import (
    ActivationCheckpointingConfig,
    ConfigError,
    ZeroConfig,
    load_config,
    load_deepspeed_config,
)

BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tier": "nvme"},
        "nvme_paths",
        "expected a folder with tier 'nvme', got none. Name at least one folder",
    ),
    ({"tier": "host", "nvme_paths": ["/a"]}, "nvme_paths", "has no effect: tier is 'host'"),
    ({"tier": "nvme", "nvme_paths": ["/a", "/a/"]}, "nvme_paths", "Name each folder once"),
    (
        {"tier": "nvme", "nvme_paths": ["/a"], "cpu_checkpointing": True},
        "cpu_checkpointing",
        "expected false with tier 'nvme', got True",
    ),
    (
        {"contiguous_memory_optimization": True},
        "number_checkpoints",
        "expected a number with contiguous_memory_optimization true",
    ),
    (
        {
            "contiguous_memory_optimization": True,
            "number_checkpoints": 4,
            "tier": "nvme",
            "nvme_paths": ["/a"],
        },
        "contiguous_memory_optimization",
        "expected false with tier 'nvme', where extents need no memory, got True",
    ),
    ({"number_checkpoints": 4}, "number_checkpoints", "got 4, which has no effect"),
    ({"number_checkpoints": 0}, "number_checkpoints", "expected an integer of at least 1"),
    (
        {"save_ops": ["aten.mm"], "save_budget_bytes": 9},
        "save_budget_bytes",
        "expected null alongside save_ops, got",
    ),
    ({"mode": "offload_saved_tensors"}, "tier", "Set tier to 'host' or 'nvme'"),
    (
        {"mode": "offload_saved_tensors", "tier": "host", "save_budget_bytes": 1},
        "save_budget_bytes",
        "has no effect",
    ),
    (
        {"mode": "offload_saved_tensors", "tier": "host", "partition_activations": True},
        "partition_activations",
        "has no effect",
    ),
    ({"tier": "cpu"}, "tier", "'device', 'host' or 'nvme'"),
    ({"buffer_bytes": 1}, "buffer_bytes", "at least 1048576"),
    (
        {"tier": "host", "buffer_bytes": 2**21},
        "buffer_bytes",
        "got 2097152 (int), which has no effect. tier is 'host'",
    ),
    ({"prefetch": 2}, "prefetch", "got 2 (int), which has no effect. tensors stay where they are"),
    (
        {"save_ops": ["aten.mm"], "min_offload_bytes": 0},
        "min_offload_bytes",
        "got 0 (int), which has no effect",
    ),
]


@pytest.mark.parametrize(("values", "key", "text"), BAD)
def test_refused(values: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"activation_checkpointing": values})
    assert error.value.paths == (f"activation_checkpointing.{key}",) and text in str(error.value)


def test_the_default_moves_nothing_and_every_policy_survives_json() -> None:
    assert (
        ZeroConfig().activation_checkpointing == ActivationCheckpointingConfig()
        and not ActivationCheckpointingConfig().moves
    )
    for values in (
        {"cpu_checkpointing": True},
        {"tier": "nvme", "nvme_paths": ["/a"], "partition_activations": True},
        {"contiguous_memory_optimization": True, "number_checkpoints": 4, "save_ops": ["aten.mm"]},
        {"partition_activations": True, "prefetch": 0, "min_offload_bytes": 0},
        {
            "mode": "offload_saved_tensors",
            "tier": "nvme",
            "nvme_paths": ["/a"],
            "buffer_bytes": 2**21,
            "prefetch": 4,
        },
    ):
        policy = ActivationCheckpointingConfig.from_mapping(values)
        assert policy.moves and ActivationCheckpointingConfig.from_mapping(policy.to_mapping()) == policy
    assert ActivationCheckpointingConfig(cpu_checkpointing=True).storage_tier == "host"


def test_deepspeeds_section() -> None:
    section = {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
    }
    found = load_deepspeed_config({"activation_checkpointing": section})
    assert found.config.activation_checkpointing == ActivationCheckpointingConfig(**section)
    alone = load_deepspeed_config({"activation_checkpointing": {"number_checkpoints": 4}})
    assert alone.config.activation_checkpointing == ActivationCheckpointingConfig()
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing\.number_checkpoints: expected .*, got none"
    ):
        load_deepspeed_config({"activation_checkpointing": {"contiguous_memory_optimization": True}})
