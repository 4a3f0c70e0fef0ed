"""Compressed communication: what is refused and why, and DeepSpeed's keys for it."""

from __future__ import annotations

from typing import Any

import pytest

from zero_ext.config import CommunicationConfig, ConfigError, load_config, load_deepspeed_config
from zero_ext.config.communication import Reduction, resolve_reduction

ON: dict[str, Any] = {
    "quantized_weights": "int8",
    "quantized_gradients": "int4",
    "hierarchical_partition": True,
    "shard_group_size": 2,
}


@pytest.mark.parametrize(("key", "least"), list(zip(ON, (3, 2, 3, 3), strict=True)))
def test_stages_that_shard_nothing_are_refused_by_name(key: str, least: int) -> None:
    for stage in range(4):
        config = {"stage": stage, "communication": {key: ON[key]}}
        if stage >= least:
            assert getattr(load_config(config).communication, key) == ON[key]
            continue
        with pytest.raises(ConfigError, match=rf"communication\.{key}.*but stage is {stage}.*Set stage to"):
            load_config(config)


@pytest.mark.parametrize("key", ["quantized_gradients", "hierarchical_partition"])
def test_sharding_groups_are_not_combined_with(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*together with shard_group_size = 2"):
        CommunicationConfig(shard_group_size=2, **{key: ON[key]})


def translated(**keys: Any) -> tuple[CommunicationConfig, dict[str, str]]:
    found = load_deepspeed_config({"train_batch_size": 4, "zero_optimization": keys})
    notes = {note.path.rpartition(".")[2]: note.why for note in found.notes}
    return found.config.communication, notes


def test_deepspeed_keys() -> None:
    found, notes = translated(
        stage=3, zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz_partition_size=8
    )
    assert found == CommunicationConfig(
        quantized_weights="int8", quantized_gradients="int4", hierarchical_partition=True, ranks_per_node=8
    )
    assert not {"zero_quantized_weights", "zero_hpz_partition_size"} & notes.keys()
    assert translated(stage=3, mics_shard_size=4)[0] == CommunicationConfig(shard_group_size=4)
    off = {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}
    assert translated(stage=3, **off) == (CommunicationConfig(), translated(stage=3)[1])


def test_deepspeed_keys_in_stages_without_shards_are_noted() -> None:
    found, notes = translated(stage=2, zero_quantized_weights=True, zero_quantized_gradients=True)
    assert found == CommunicationConfig(quantized_gradients="int4")
    assert "acts in stage 3, and the stage is 2" in notes["zero_quantized_weights"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"mics_shard_size": 2, "zero_quantized_gradients": True}, "together with zero_quantized_gradients"),
        ({"mics_shard_size": 2, "zero_hpz_partition_size": 2}, "together with zero_hpz_partition_size"),
        ({"mics_shard_size": 0}, "got 0"),
        ({"zero_quantized_nontrainable_weights": True}, "Frozen weights keep their precision"),
    ],
)
def test_deepspeed_keys_that_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        translated(stage=3, **keys)


@pytest.mark.parametrize(
    ("wanted", "ranks", "of_a_node", "most", "adds", "found"),
    [
        ("auto", 8, 8, 256, True, "rank_order"),
        ("auto", 16, 8, 256, True, "node_order"),
        ("auto", 16, 1, 256, True, "rank_order"),
        ("auto", 1024, 8, 256, True, "node_order"),
        ("auto", 257, 257, 256, True, "backend"),
        ("auto", 8 * 257, 8, 256, True, "backend"),
        ("auto", 16, 8, None, False, "rank_order"),  # in host memory
        ("auto", 1024, 8, None, False, "rank_order"),
        ("auto", 1024, 8, 256, False, "node_order"),  # through host memory
        ("rank_order", 16, 8, 256, True, "rank_order"),
        ("node_order", 16, 8, None, False, "node_order"),
        ("node_order", 8, 8, 256, True, "rank_order"),  # the same on one node
        ("backend", 8, 8, 256, True, "backend"),
        ("backend", 16, 8, None, False, "rank_order"),
        ("rank_order", 257, 1, 256, True, None),
        ("auto", 257, 257, 256, False, None),
        ("node_order", 8 * 257, 8, 256, True, None),
    ],
)
def test_how_gradients_are_added_up(
    wanted: Reduction, ranks: int, of_a_node: int, most: int | None, adds: bool, found: str | None
) -> None:
    if found is None:
        with pytest.raises(ValueError, match=r"precision\.reduction: expected for .* at most 256 .* 'auto'"):
            resolve_reduction(wanted, ranks, of_a_node, most, adds)
    else:
        assert resolve_reduction(wanted, ranks, of_a_node, most, adds) == found
