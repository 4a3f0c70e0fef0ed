"""Tiers and I/O settings of a native configuration: defaults, every contradiction, round trips."""

from __future__ import annotations

import json
from itertools import product

import pytest

from zero_ext.config import AioConfig, ConfigError, OffloadConfig, ZeroConfig, load_config

TIERS = ("device", "host", "nvme")
STAGE_NEEDED = {"params": 3, "grads": 2, "optimizer": 1}


def test_defaults_mean_off() -> None:
    config = ZeroConfig()
    assert config.offload == OffloadConfig(
        params="device",
        grads="device",
        optimizer="device",
        ratio=1.0,
        nvme_paths=(),
        staging_buffer_bytes=67_108_864,
        update_mode="after_backward",
        delay_start_step=0,
        checksum=False,
    )
    assert not config.offload.any_nvme
    assert config.aio == AioConfig(backend="auto", queue_depth=32, block_bytes=1_048_576, io_threads=1)


@pytest.mark.parametrize("tiers", list(product(TIERS, repeat=3)), ids="-".join)
def test_every_combination_of_tiers(tiers: tuple[str, ...]) -> None:
    """Accepted exactly in the stages that shard all that is moved; the same after a trip through JSON."""
    moved = dict(zip(("params", "grads", "optimizer"), tiers, strict=True))
    values: dict[str, object] = dict(moved)
    if "nvme" in tiers:
        values["nvme_paths"] = ["/a", "/b"]
    lowest = max((STAGE_NEEDED[kind] for kind, tier in moved.items() if tier != "device"), default=0)
    for stage in range(4):
        if stage < lowest:
            with pytest.raises(ConfigError) as caught:
                load_config({"stage": stage, "offload": values})
            (path,) = caught.value.paths
            kind = path.removeprefix("offload.")
            assert moved[kind] != "device"
            assert STAGE_NEEDED[kind] > stage
            assert f"got '{moved[kind]}'" in str(caught.value)
            assert f"stage is {stage}" in str(caught.value)
            assert f"Set stage to {STAGE_NEEDED[kind]}" in str(caught.value)
            continue
        config = load_config({"stage": stage, "offload": values})
        assert config.offload.any_nvme == ("nvme" in tiers)
        assert {kind: getattr(config.offload, kind) for kind in moved} == moved
        assert load_config(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize("kind", STAGE_NEEDED)
def test_nvme_wants_folders(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a folder with {kind} on 'nvme', got none") as caught:
        load_config({"offload": {kind: "nvme"}})
    assert caught.value.paths == ("offload.nvme_paths",)
    assert load_config({"offload": {kind: "nvme", "nvme_paths": ["/a"]}}).offload.nvme_paths == ("/a",)


@pytest.mark.parametrize("ratio", [0, -1, 1.01, float("nan"), "1/2", True])
def test_ratios_that_are_none(ratio: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"offload": {"optimizer": "host", "ratio": ratio}})
    assert caught.value.paths == ("offload.ratio",)


def test_a_ratio_wants_an_offloaded_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"got 0\.5 .*no effect") as caught:
        load_config({"offload": {"params": "host", "ratio": 0.5}})
    assert caught.value.paths == ("offload.ratio",)
    assert load_config({"offload": {"optimizer": "host", "ratio": 0.5}}).offload.ratio == 0.5


def test_direct_construction_checks_too() -> None:
    with pytest.raises(
        ConfigError, match="OffloadConfig: nvme_paths: expected a folder with params and optimizer"
    ):
        OffloadConfig(params="nvme", optimizer="nvme")
    policy = OffloadConfig(optimizer="host")
    with pytest.raises(ConfigError, match="nvme_paths"):
        policy.replace(optimizer="nvme")
    assert policy.replace(optimizer="nvme", nvme_paths=["/a"]).any_nvme


@pytest.mark.parametrize("again", ["/a/b", "/a//b", "/a/b/", "/a/./b"])
def test_a_folder_is_named_once(again: str) -> None:
    with pytest.raises(ConfigError, match=r"the same folder as nvme_paths\.0") as caught:
        load_config({"offload": {"optimizer": "nvme", "nvme_paths": ["/a/b", "/c", again]}})
    assert caught.value.paths == ("offload.nvme_paths.2",)


@pytest.mark.parametrize(
    ("values", "path", "fragments"),
    [
        ({"offload": {"nvme_paths": ["/a"]}}, "offload.nvme_paths", ("has no effect", "'nvme'")),
        (
            {"offload": {"optimizer": "host", "nvme_paths": ["/a"]}},
            "offload.nvme_paths",
            ("has no effect", "Remove it"),
        ),
        ({"offload": {"params": "cpu"}}, "offload.params", ("got 'cpu'", "'device', 'host' or 'nvme'")),
        ({"offload": {"params": None}}, "offload.params", ("got None",)),
        ({"offload": {"grads": "NVMe"}}, "offload.grads", ("got 'NVMe'",)),
        ({"offload": {"optimizer": True}}, "offload.optimizer", ("got True",)),
        (
            {"offload": {"params": "nvme", "nvme_paths": "/a"}},
            "offload.nvme_paths",
            ("a list of non-empty strings",),
        ),
        ({"offload": {"params": "nvme", "nvme_paths": ["/a", ""]}}, "offload.nvme_paths.1", ("got ''",)),
        ({"offload": {"params": "nvme", "nvme_paths": ["/a\0"]}}, "offload.nvme_paths.0", ("without NUL",)),
        (
            {"offload": {"staging_buffer_bytes": 2**20 - 4096}},
            "offload.staging_buffer_bytes",
            ("at least 1048576",),
        ),
        (
            {"offload": {"staging_buffer_bytes": 2**20 + 1}},
            "offload.staging_buffer_bytes",
            ("a multiple of 4096",),
        ),
        ({"offload": {"staging_buffer_bytes": 2**63}}, "offload.staging_buffer_bytes", ("at most",)),
        ({"offload": {"checksum": 1}}, "offload.checksum", ("true or false",)),
        ({"offload": {"optimiser": "host"}}, "offload.optimiser", ("Did you mean offload.optimizer",)),
        ({"offload": "nvme"}, "offload", ("a mapping with keys", "staging_buffer_bytes")),
        ({"aio": {"backend": "uring"}}, "aio.backend", ("'auto', 'io_uring', 'libaio' or 'threads'",)),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth", ("got 0", "from 1 to 1024")),
        ({"aio": {"queue_depth": 1025}}, "aio.queue_depth", ("got 1025", "from 1 to 1024")),
        ({"aio": {"queue_depth": True}}, "aio.queue_depth", ("got True (bool)",)),
        ({"aio": {"block_bytes": 0}}, "aio.block_bytes", ("got 0", "at least 4096")),
        ({"aio": {"block_bytes": 4097}}, "aio.block_bytes", ("got 4097", "a multiple of 4096")),
        ({"aio": {"io_threads": 17}}, "aio.io_threads", ("got 17", "from 1 to 16")),
        ({"aio": {"io_threads": 0}}, "aio.io_threads", ("got 0",)),
        ({"aio": {"block_size": 4096}}, "aio.block_size", ("Did you mean aio.block_bytes",)),
    ],
)
def test_mistakes_are_named(values: dict[str, object], path: str, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert path in caught.value.paths
    for fragment in (path, *fragments):
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "aio", [{"queue_depth": 1, "io_threads": 1}, {"queue_depth": 1024, "io_threads": 16}]
)
def test_limits_belong_to_the_range(aio: dict[str, int]) -> None:
    config = load_config({"aio": {**aio, "block_bytes": 4096.0}, "offload": {"staging_buffer_bytes": 2**20}})
    assert config.aio == AioConfig(**aio, block_bytes=4096)
    assert config.offload.staging_buffer_bytes == 2**20


def test_only_the_host_delays_updates() -> None:
    for tier in ("host", "nvme"):
        paths = {"nvme_paths": ["/a"]} if tier == "nvme" else {}
        policy = {"optimizer": tier, "update_mode": "delayed", "delay_start_step": 40, **paths}
        config = load_config({"offload": policy})
        assert (config.offload.update_mode, config.offload.delay_start_step) == ("delayed", 40)
    with pytest.raises(ConfigError, match=r"update_mode: expected .* for 'delayed', got 'device'") as caught:
        load_config({"offload": {"update_mode": "delayed"}})
    assert caught.value.paths == ("offload.update_mode",)
    with pytest.raises(ConfigError, match="got 40, which has no effect") as caught:
        load_config({"offload": {"optimizer": "host", "delay_start_step": 40}})
    assert caught.value.paths == ("offload.delay_start_step",)
