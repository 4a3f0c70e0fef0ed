"""Native configuration: loading from every source, tiers and sections, and how errors are raised."""

from __future__ import annotations

import json
import pickle
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from zero_ext.config import (
    ActivationCheckpointingConfig,
    AioConfig,
    BatchConfig,
    ConfigError,
    OffloadConfig,
    SparseAttentionConfig,
    UnitConfig,
    ZeroConfig,
    load_config,
    load_deepspeed_config,
)

TIERS = ("device", "host", "nvme")
STAGE_NEEDED = {"params": 3, "grads": 2, "optimizer": 1}


def test_every_source_is_read_alike(tmp_path: Path) -> None:
    values = {
        "stage": 2,
        "units": {"bucket_elements": 5e8, "leaf_modules": ["Experts"]},
        "gradient_clipping": 1,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    units = UnitConfig(bucket_elements=500_000_000, leaf_modules=("Experts",))
    wanted = ZeroConfig(stage=2, units=units, gradient_clipping=1.0)
    for source in (values, MappingProxyType(values), path, str(path), wanted, wanted.to_mapping()):
        assert load_config(source) == wanted
    assert json.loads(json.dumps(wanted.to_mapping())) == wanted.to_mapping()
    assert load_config(None) == ZeroConfig()
    with pytest.raises(TypeError, match="configuration: expected a ZeroConfig"):
        load_config(3)  # type: ignore[arg-type]


def test_frozen_and_replaced() -> None:
    config = ZeroConfig(stage=1)
    with pytest.raises(ValueError, match="frozen"):
        config.stage = 2
    assert config.replace(stage=2).stage == 2
    assert config.stage == 1
    for make in (lambda: config.replace(stage=9), lambda: ZeroConfig(stage=9)):
        with pytest.raises(ConfigError, match="stage: expected an integer from 0 to 3, got 9"):
            make()
    with pytest.raises(ConfigError, match=r"OffloadConfig: nvme_paths: .* with params and optimizer"):
        OffloadConfig(params="nvme", optimizer="nvme")
    with pytest.raises(TypeError, match="keyword arguments"):
        BatchConfig(4)  # type: ignore[misc]


def test_all_mistakes_at_once_and_file_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"stage": 7, "seed": -1, "unknown": 1}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert set(caught.value.paths) == {"stage", "seed", "unknown"}
    assert str(caught.value).startswith(str(path))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.paths) == (str(caught.value), caught.value.paths)


@pytest.mark.parametrize("key", ["zero_optimization", "train_micro_batch_size_per_gpu", "fp16", "bf16"])
def test_keys_of_both_formats_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({key: 1, "stage": 7}))
    for source in (path, {key: 1, "stage": 7}):
        with pytest.raises(ConfigError, match=f"{key}: is DeepSpeed's key, and 'stage'") as caught:
            load_config(source)
        assert caught.value.paths == (key,)


def test_params_are_copied_and_of_bounded_depth() -> None:
    params: dict[str, Any] = {"lr": 0.1}
    config = load_config({"optimizer": {"type": "sgd", "params": params}})
    params["lr"] = params
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params) == ("SGD", {"lr": 0.1})
    with pytest.raises(ConfigError, match="expected at most 8 nested levels"):
        load_config({"optimizer": {"type": "SGD", "params": params}})


@pytest.mark.parametrize("tiers", list(product(TIERS, repeat=3)), ids="-".join)
def test_every_combination_of_tiers(tiers: tuple[str, ...]) -> None:
    """Accepted exactly in the stages that shard all that is moved; the same after a trip through JSON."""
    moved = dict(zip(STAGE_NEEDED, tiers, strict=True))
    values = moved | ({"nvme_paths": ["/a", "/b"]} if "nvme" in tiers else {})
    lowest = max((STAGE_NEEDED[kind] for kind, tier in moved.items() if tier != "device"), default=0)
    for stage in range(4):
        if stage < lowest:
            with pytest.raises(ConfigError) as caught:
                load_config({"stage": stage, "offload": values})
            (path,) = caught.value.paths
            kind = path.removeprefix("offload.")
            assert moved[kind] != "device" and STAGE_NEEDED[kind] > stage
            for words in (f"got '{moved[kind]}'", f"stage is {stage}", f"Set stage to {STAGE_NEEDED[kind]}"):
                assert words in str(caught.value)
            continue
        config = load_config({"stage": stage, "offload": values})
        assert config.offload.any_nvme == ("nvme" in tiers)
        assert {kind: getattr(config.offload, kind) for kind in moved} == moved
        assert load_config(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize(
    "aio", [{"queue_depth": 1, "io_threads": 1}, {"queue_depth": 1024, "io_threads": 16}]
)
def test_limits_belong_to_the_range(aio: dict[str, int]) -> None:
    config = load_config({"aio": {**aio, "block_bytes": 4096.0}, "offload": {"staging_buffer_bytes": 2**20}})
    assert config.aio == AioConfig(**aio, block_bytes=4096)
    assert config.offload.staging_buffer_bytes == 2**20


def test_updates_are_delayed_on_host_and_nvme() -> None:
    for values in ({"optimizer": "host"}, {"optimizer": "nvme", "nvme_paths": ["/a"]}):
        policy = load_config(
            {"offload": {**values, "update_mode": "delayed", "delay_start_step": 40}}
        ).offload
        assert (policy.update_mode, policy.delay_start_step) == ("delayed", 40)


def test_null_is_the_default_of_the_mode_of_attention() -> None:
    def policy(**values: Any) -> SparseAttentionConfig:
        return SparseAttentionConfig.from_mapping(values)

    assert policy(mode="local_sliding_window").unidirectional
    assert not policy(mode="local_sliding_window", attention="bidirectional").unidirectional
    assert not policy().unidirectional
    assert (policy(mode="bigbird").random_blocks, policy(mode="variable").random_blocks) == (1, 0)
    assert policy(mode="bigbird", num_random_blocks=0).random_blocks == 0
    both = policy(mode="bslongformer", global_block_indices=[0, 7], global_block_end_indices=[2, 9])
    assert both.global_ranges == ((0, 2), (7, 9))
    assert SparseAttentionConfig.from_mapping(both.to_mapping()) == both


def test_heads_share_a_layout_where_they_are_alike() -> None:
    different = {"different_layout_per_head": True}
    for values, layouts in (
        ({"mode": "fixed", **different}, 1),
        ({"mode": "fixed", **different, "num_different_global_patterns": 2}, 6),
        ({"mode": "bigbird"}, 1),
        ({"mode": "bigbird", **different}, 6),
        ({"mode": "bigbird", **different, "num_random_blocks": 0}, 1),
        ({"mode": "bslongformer", **different}, 1),
    ):
        assert SparseAttentionConfig.from_mapping(values).layout_heads(6) == layouts


def test_activation_checkpointing_moves_and_survives_json() -> None:
    nvme = {"tier": "nvme", "nvme_paths": ["/a"]}
    assert not ZeroConfig().activation_checkpointing.moves
    for values in (
        {"cpu_checkpointing": True},
        nvme | {"partition_activations": True},
        {"contiguous_memory_optimization": True, "number_checkpoints": 4, "save_ops": ["aten.mm"]},
        {"partition_activations": True, "prefetch": 0, "min_offload_bytes": 0},
        nvme | {"mode": "offload_saved_tensors", "buffer_bytes": 2**21, "prefetch": 4},
    ):
        policy = ActivationCheckpointingConfig.from_mapping(values)
        assert policy.moves and ActivationCheckpointingConfig.from_mapping(policy.to_mapping()) == policy
    assert ActivationCheckpointingConfig(cpu_checkpointing=True).storage_tier == "host"


def test_deepspeeds_activation_checkpointing() -> None:
    used = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    section = dict.fromkeys((*used, "synchronize_checkpoint_boundary", "profile"), True) | {
        "number_checkpoints": 4
    }
    found = load_deepspeed_config({"activation_checkpointing": section})
    assert found.config.activation_checkpointing == ActivationCheckpointingConfig(**section)
    alone = load_deepspeed_config({"activation_checkpointing": {"number_checkpoints": 4}})
    assert alone.config.activation_checkpointing == ActivationCheckpointingConfig()
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.number_checkpoints: .*, got none"):
        load_deepspeed_config({"activation_checkpointing": {"contiguous_memory_optimization": True}})
