"""Mistakes in a native configuration: each is refused with its key, the value seen and what is expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_ext.config import ConfigError, load_config

PATTERNS, ENDS = "num_different_global_patterns", "global_block_end_indices"
HORIZONTAL, CONTIGUOUS = "horizontal_global_attention", "contiguous_memory_optimization"
PER_HEAD, RANGES = (
    {"different_layout_per_head": True},
    {"mode": "bslongformer", "global_block_indices": [0, 5]},
)
NVME, SAVED = {"tier": "nvme", "nvme_paths": ["/a"]}, {"save_ops": ["aten.mm"]}
MOVED = {"mode": "offload_saved_tensors", "tier": "host"}
# The wrong key and its value, and words of the error about that key.
VALUES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("stage", 4, ("got 4 (int)", "an integer from 0 to 3")),
    ("stage", True, ("got True (bool)", "an integer")),
    ("stage", 2.5, ("got 2.5",)),
    ("stagee", 3, ("unknown key", "stage")),
    ("unit", {}, ("Did you mean units",)),
    ("units", 3, ("a mapping with keys", "max_live_elements")),
    ("units.bucket", 3, ("Did you mean units.bucket_elements",)),
    ("units.bucket_elements", 0, ("got 0", "at least 1")),
    ("units.leaf_modules", "Experts", ("a list of non-empty strings",)),
    ("units.experts", "some", ("'all' or 'routed'", "got 'some'")),
    ("units.update_experts", "some", ("'all' or 'routed'", "got 'some'")),
    (
        "units.update_experts",
        "routed",
        ("expected 'all' with units.experts 'all'", "Set experts to 'routed'"),
    ),
    ("gradient_clipping", math.nan, ("got nan", "finite")),
    ("gradient_clipping", True, ("got True (bool)",)),
    ("gradient_clipping", -1.0, ("got -1.0", "at least 0")),
    ("gradient_clipping", 10**400, ("finite",)),
    ("check_finite", 1, ("got 1 (int)", "true or false")),
    ("timeout_seconds", 0, ("got 0", "above 0")),
    ("steps_per_print", 1.5, ("got 1.5",)),
    ("monitor.csv", "", ("got ''", "expected true, false or a path")),
    ("monitor.tensorboard", 1, ("got 1", "expected true, false or a path")),
    ("seed", 2**63, ("at most 4611686018427387904",)),
    ("precision.dtype", "float16", ("'keep', 'fp32', 'bf16' or 'fp16'",)),
    ("precision.moments_dtype", "fp16", ("'fp32', 'bf16' or '8bit'",)),
    ("loss_scale.minimum", 3e9, ("65536", "raise initial_power")),
    ("optimizer.type", "LBFGS", ("expected a supported optimizer, got LBFGS",)),
    ("optimizer.type", "AdamV", ("Did you mean Adam",)),
    ("scheduler.type", "LambdaLR", ("expected a supported scheduler, got LambdaLR", "lr_scheduler")),
    ("checkpoint.keep_last", 0, ("got 0", "or null")),
    ("checkpoint.tag_validation", "WARN", ("'ignore'",)),
    ("offload", "nvme", ("a mapping with keys", "staging_buffer_bytes")),
    ("offload.params", "cpu", ("got 'cpu'", "'device', 'host' or 'nvme'")),
    ("offload.params", None, ("got None",)),
    ("offload.grads", "NVMe", ("got 'NVMe'",)),
    ("offload.optimiser", "host", ("Did you mean offload.optimizer",)),
    ("offload.nvme_paths", ["/a"], ("has no effect", "'nvme'")),
    ("offload.nvme_paths", "/a", ("a list of non-empty strings",)),
    ("offload.staging_buffer_bytes", 2**20 - 4096, ("at least 1048576",)),
    ("offload.staging_buffer_bytes", 2**20 + 1, ("a multiple of 4096",)),
    ("offload.staging_buffer_bytes", 2**63, ("at most",)),
    ("offload.checksum", 1, ("true or false",)),
    ("offload.ratio", 0.5, ("got 0.5", "no effect")),
    ("offload.ratio", 0, ("got 0",)),
    ("offload.ratio", 1.01, ("got 1.01",)),
    ("offload.ratio", True, ("got True",)),
    ("offload.update_mode", "delayed", ("for 'delayed', got 'device'",)),
    ("offload.delay_start_step", 40, ("got 40, which has no effect",)),
    ("aio.backend", "uring", ("'auto', 'io_uring', 'libaio' or 'threads'",)),
    ("aio.queue_depth", 0, ("got 0", "from 1 to 1024")),
    ("aio.queue_depth", 1025, ("got 1025", "from 1 to 1024")),
    ("aio.block_bytes", 0, ("got 0", "at least 4096")),
    ("aio.block_bytes", 4097, ("got 4097", "a multiple of 4096")),
    ("aio.block_size", 4096, ("Did you mean aio.block_bytes",)),
    ("aio.io_threads", 17, ("got 17", "from 1 to 16")),
    ("aio.io_threads", 0, ("got 0",)),
    ("communication.quantized_weights", "int2", ("got 'int2'",)),
    ("communication.ranks_per_node", 0, ("got 0",)),
    ("communication.shard_group_size", -1, ("got -1",)),
    ("sparse_attention.mode", "strided", ("'local_sliding_window'",)),
    ("sparse_attention.block", 48, ("16, 32, 64 or 128",)),
    ("sparse_attention.num_different_global_patterns", 2, ("per_head to true",)),
    ("activation_checkpointing.number_checkpoints", 4, ("got 4, which has no effect",)),
    ("activation_checkpointing.number_checkpoints", 0, ("expected an integer of at least 1",)),
    ("activation_checkpointing.tier", "cpu", ("'device', 'host' or 'nvme'",)),
    ("activation_checkpointing.buffer_bytes", 1, ("at least 1048576",)),
    ("activation_checkpointing.prefetch", 2, ("got 2 (int), which has no effect. tensors stay",)),
]
# Of each section: its keys, the one that the error names (or a deeper one), and words of the error.
SECTIONS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "units": [
        ({"leaf_modules": ["a", 3]}, "leaf_modules.1", "got 3 (int)"),
        ({"": 1}, "''", "unknown key"),
    ],
    "parallel": [
        ({"cp": 4, "ring": 3}, "ring", "expected a divisor of parallel.cp (4), got 3"),
        ({"cp": 2, "ep": 2}, "ep", "expected 1 with parallel.cp 2, got 2"),
    ],
    "monitor": [({"progress": {}}, "progress.steps", "required key is missing")],
    "optimizer": [
        ({"params": {}}, "type", "required key is missing"),
        ({"type": "SGD", "params": {"lr": math.nan}}, "params.lr", "got nan"),
        ({"type": "SGD", "params": {"lr": [0, math.inf]}}, "params.lr.1", "inf"),
        ({"type": "SGD", "params": {"lr": print}}, "params.lr", "builtin"),
        ({"type": "SGD", "params": {"lr": 10**400}}, "params.lr", "finite"),
    ],
    "offload": [
        ({"optimizer": "host", "nvme_paths": ["/a"]}, "nvme_paths", "Remove it"),
        ({"optimizer": "host", "delay_start_step": 40}, "delay_start_step", "no effect"),
        ({"params": "host", "ratio": 0.5}, "ratio", "no effect"),
        ({"params": "nvme", "nvme_paths": ["/a", ""]}, "nvme_paths.1", "got ''"),
        ({"params": "nvme", "nvme_paths": ["/a\0"]}, "nvme_paths.0", "without NUL"),
        *(({kind: "nvme"}, "nvme_paths", f"{kind} on 'nvme'") for kind in ("params", "grads", "optimizer")),
        *(
            (
                {"grads": "nvme", "nvme_paths": ["/a/b", "/c", again]},
                "nvme_paths.2",
                "same folder as nvme_paths.0",
            )
            for again in ("/a/b", "/a//b", "/a/b/", "/a/./b")
        ),
    ],
    "sparse_attention": [
        ({"mode": "fixed", "num_random_blocks": 1}, "num_random_blocks", "used by variable, bigbird"),
        ({"mode": "dense", "seed": 1}, "seed", "it has no effect in mode 'dense'"),
        ({"num_global_blocks": 3}, "num_global_blocks", "a divisor of num_local_blocks (4), got 3"),
        (PER_HEAD | {PATTERNS: 5}, PATTERNS, "at most num_local_blocks / num_global_blocks = 4"),
        (
            {"attention": "unidirectional", HORIZONTAL: True},
            HORIZONTAL,
            "false with attention 'unidirectional'",
        ),
        ({"mode": "variable", "local_window_blocks": []}, "local_window_blocks", "a list of integers"),
        ({"mode": "variable", "local_window_blocks": [2, 0]}, "local_window_blocks.1", "got 0"),
        (RANGES | {ENDS: [2]}, ENDS, "expected 2 entries, as global_block_indices has, got 1"),
        (RANGES | {ENDS: [2, 5]}, f"{ENDS}.1", "expected more than its start 5, got"),
        ({"mode": "bigbird", "num_sliding_block": 3}, "num_sliding_block", "Did you mean"),
    ],
    "activation_checkpointing": [
        (
            {"tier": "nvme"},
            "nvme_paths",
            "expected a folder with tier 'nvme', got none. Name at least one folder",
        ),
        ({"tier": "host", "nvme_paths": ["/a"]}, "nvme_paths", "has no effect: tier is 'host'"),
        ({"tier": "nvme", "nvme_paths": ["/a", "/a/"]}, "nvme_paths", "Name each folder once"),
        (
            NVME | {"cpu_checkpointing": True},
            "cpu_checkpointing",
            "expected false with tier 'nvme', got True",
        ),
        ({CONTIGUOUS: True}, "number_checkpoints", f"expected a number with {CONTIGUOUS} true"),
        (
            NVME | {CONTIGUOUS: True, "number_checkpoints": 4},
            CONTIGUOUS,
            "where extents need no memory, got True",
        ),
        (SAVED | {"save_budget_bytes": 9}, "save_budget_bytes", "expected null alongside save_ops, got"),
        (SAVED | {"min_offload_bytes": 0}, "min_offload_bytes", "got 0 (int), which has no effect"),
        ({"mode": "offload_saved_tensors"}, "tier", "Set tier to 'host' or 'nvme'"),
        (MOVED | {"save_budget_bytes": 1}, "save_budget_bytes", "has no effect"),
        (MOVED | {"partition_activations": True}, "partition_activations", "has no effect"),
        (
            {"tier": "host", "buffer_bytes": 2**21},
            "buffer_bytes",
            "got 2097152 (int), which has no effect. tier is",
        ),
    ],
}


def refused(values: dict[str, Any], path: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert caught.value.paths == (path,)
    assert all(each in str(caught.value) for each in (path, *words)), str(caught.value)


@pytest.mark.parametrize(("path", "value", "words"), VALUES)
def test_a_wrong_value_is_named(path: str, value: Any, words: tuple[str, ...]) -> None:
    values = value
    for name in reversed(path.split(".")):
        values = {name: values}
    refused(values, path, words)


@pytest.mark.parametrize("section", SECTIONS)
def test_contradictions_within_a_section_are_named(section: str) -> None:
    for values, path, words in SECTIONS[section]:
        refused({section: values}, f"{section}.{path}", (words,))


def test_contradictions_between_sections_and_strange_keys_and_values() -> None:
    refused({"loss_scale": {"static": 8}, "precision": {"dtype": "bf16"}}, "loss_scale", ("fp16 only",))
    refused({"seed": 10**5000}, "seed", ("too large to print",))
    refused({"a.b": 1}, "a.b", ("unknown key", "stage"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"stage": 2}, ("stage is 2", "Set stage to 3")),
        ({"communication": {"quantized_weights": "int8"}}, ("communication.quantized_weights = 'int8'",)),
        ({"communication": {"hierarchical_partition": True}}, ("Remove hierarchical_partition",)),
        ({"communication": {"shard_group_size": 2}}, ("communication.shard_group_size = 2",)),
    ],
)
def test_routed_experts_need_exact_shards_of_all_ranks(other: dict[str, Any], words: tuple[str, ...]) -> None:
    refused({"units": {"experts": "routed"}, **other}, "units.experts", ("got 'routed'", *words))
    assert load_config({"units": {"experts": "all"}, **other}).units.experts == "all"


def test_skipped_experts_need_moments_of_their_own() -> None:
    units = {"experts": "routed", "update_experts": "routed"}
    shared = ("precision.moments_dtype = '8bit'", "Set moments_dtype to 'fp32' or 'bf16'")
    refused({"units": units, "precision": {"moments_dtype": "8bit"}}, "units.update_experts", shared)
    assert (
        load_config({"units": units, "precision": {"moments_dtype": "bf16"}}).units.update_experts == "routed"
    )
