"""DeepSpeed's offload and aio sections: what becomes of every key and of every contradiction."""

from __future__ import annotations

from typing import Any

import pytest

from zero_ext.config import (
    AioConfig,
    ConfigError,
    OffloadConfig,
    Translation,
    ZeroConfig,
    load_deepspeed_config,
)
from zero_ext.config.deepspeed.deepspeed_keys import Key
from zero_ext.config.deepspeed.offload_keys import AIO, OPTIMIZER, PARAM
from zero_ext.config.deepspeed.translate import KEYS, TABLE

TIER = {"none": "device", "cpu": "host", "nvme": "nvme"}


def section_keys(section: str) -> list[Key]:
    return [key for key in TABLE if key.path.startswith(f"{section}.")]


def load(stage: Any = 3, aio: Any = None, **zero: Any) -> Translation:
    source: dict[str, Any] = {"gradient_clipping": 0, "zero_optimization": {"stage": stage, **zero}}
    return load_deepspeed_config(source if aio is None else {**source, "aio": aio})


def nvme(path: str = "/nvme", **more: object) -> dict[str, object]:
    return {"device": "nvme", "nvme_path": path, **more}


def refused(stage: Any = 3, aio: Any = None, **zero: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(stage, aio, **zero)
    for path in caught.value.paths:
        assert path in str(caught.value)
    return caught.value


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_optimizer_and_its_gradients(stage: int, device: str) -> None:
    section = {"device": device} if device != "nvme" else nvme()
    if stage == 0 and device != "none":
        error = refused(stage, offload_optimizer=section)
        assert error.paths == (f"{OPTIMIZER}.device",)
        assert "Set stage to 1 or 2 or 3" in str(error)
        return
    found = load(stage, offload_optimizer=section)
    assert found.notes == ()
    assert found.config == ZeroConfig(
        stage=stage,
        offload=OffloadConfig(
            optimizer=TIER[device],
            grads="host" if device != "none" and stage >= 2 else "device",
            nvme_paths=("/nvme",) if device == "nvme" else (),
        ),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_parameters(stage: int, device: str) -> None:
    section = {"device": device} if device != "nvme" else nvme()
    if stage < 3 and device != "none":
        section.pop("nvme_path", None)
        ignored = load(stage, offload_param={**section, "pin_memory": True, "buffer_count": 3})
        assert ignored.config == load(stage).config
        assert [(note.path, note.outcome) for note in ignored.notes] == [(PARAM, "no effect")]
        assert f"the stage is {stage}" in ignored.notes[0].why
        return
    found = load(stage, offload_param=section)
    assert found.notes == ()
    assert found.config.offload == OffloadConfig(
        params=TIER[device], nvme_paths=("/nvme",) if device == "nvme" else ()
    )


@pytest.mark.parametrize(
    ("param", "optimizer", "paths"),
    [
        ("/a", "/b", ("/a", "/b")),
        ("/a", "/a", ("/a",)),
        ("/a/", "/a", ("/a/",)),
        (None, "/b", ("/b",)),
        ("/a", None, ("/a",)),
    ],
)
def test_folders_of_both_sections_join(
    param: str | None, optimizer: str | None, paths: tuple[str, ...]
) -> None:
    sections = {"offload_param": param, "offload_optimizer": optimizer}
    found = load(**{name: nvme(path) if path else {"device": "cpu"} for name, path in sections.items()})
    assert found.config.offload.nvme_paths == paths
    assert found.config.offload.params == ("nvme" if param else "host")
    assert found.config.offload.optimizer == ("nvme" if optimizer else "host")
    assert found.config.offload.grads == "host"


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_paths_of_a_section(section: str) -> None:
    path = f"zero_optimization.{section}.nvme_path"
    for extra in ({}, {"nvme_path": None}, {"nvme_path": "auto"}):
        error = refused(**{section: {"device": "nvme", **extra}})
        assert error.paths == (path,) and "required key is missing" in str(error)
    for wrong in ("", "a\0b", 3, ["/a"]):
        error = refused(**{section: {"device": "nvme", "nvme_path": wrong}})
        assert path in error.paths and "expected a path" in str(error)
    found = load(**{section: {"device": "cpu", "nvme_path": "/nvme"}})
    assert [(note.path, note.why) for note in found.notes] == [(path, "device is 'cpu'")]
    assert found.config.offload.nvme_paths == ()


def test_devices_in_any_case() -> None:
    assert load(offload_optimizer={"device": "CPU"}).config.offload.optimizer == "host"
    assert load(offload_param=nvme() | {"device": "NVMe"}).config.offload.params == "nvme"
    off = load(offload_optimizer={"device": "NONE", "ratio": 0.5, "super_offload": True})
    assert (off.config, off.notes) == (ZeroConfig(), ())


@pytest.mark.parametrize(
    "key",
    [key for key in section_keys(PARAM) + section_keys(OPTIMIZER) if key.fate == "no effect"],
    ids=lambda key: key.path,
)
def test_buffers_and_pipelines_are_noted_once(key: Any) -> None:
    section, name = key.path.split(".")[1:]
    value = next(v for v in (False, True, 7, 0.5) if key.value_type.fits(v) and key.asks_for_something(v))
    for device in ({"device": "cpu"}, nvme()):
        found = load(**{section: {**device, name: value}})
        assert [(note.path, note.outcome, note.why) for note in found.notes] == [
            (key.path, "no effect", key.why)
        ]
        assert found.config == load(**{section: device}).config
    assert load(**{section: {"device": "none", name: value}}).notes == ()


@pytest.mark.parametrize("device", [{"device": "cpu"}, nvme()], ids=["cpu", "nvme"])
def test_partial_offload_and_speculative_steps(device: dict[str, object]) -> None:
    full = load(offload_optimizer=device)
    for ratio in (1, 1.0, "auto"):
        assert load(offload_optimizer={**device, "ratio": ratio}) == full
    found = load(offload_optimizer={**device, "ratio": 0.3})
    assert found.notes == () and found.config.offload == full.config.offload.replace(ratio=0.3)
    assert load(offload_optimizer={**device, "ratio": 0}) == load()
    for wrong in (-0.1, 1.1, "half", True):
        assert f"{OPTIMIZER}.ratio" in refused(offload_optimizer={**device, "ratio": wrong}).paths
    error = refused(offload_optimizer={**device, "super_offload": True})
    assert error.paths == (f"{OPTIMIZER}.super_offload",)
    assert "offload.update_mode 'in_backward'" in str(error)
    assert load(offload_optimizer={**device, "super_offload": False}).notes == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_old_optimizer_flag(stage: int) -> None:
    new = load(stage, offload_optimizer={"device": "cpu"})
    assert load(stage, cpu_offload=True) == new
    assert load(stage, cpu_offload=False).config == load(stage, cpu_offload=None).config == load(stage).config


@pytest.mark.parametrize("name", ["cpu_offload_param", "cpu_offload_params"])
def test_old_parameter_flag(name: str) -> None:
    assert load(**{name: True}) == load(offload_param={"device": "cpu"})
    assert load(**{name: False}).config == ZeroConfig()
    assert load(**{name: True}, cpu_offload=True).config.offload == OffloadConfig(
        params="host", grads="host", optimizer="host"
    )
    ignored = load(stage=2, **{name: True})
    assert ignored.config == load(stage=2).config
    assert [note.path for note in ignored.notes] == [f"zero_optimization.{name}"]
    error = refused(**{name: True}, offload_param=nvme())
    assert error.paths == (f"zero_optimization.{name}",)
    assert f"old form of {PARAM}" in str(error)


def test_old_flags_beside_what_replaced_them() -> None:
    assert refused(stage=0, cpu_offload=True).paths == ("zero_optimization.cpu_offload",)
    for value in (True, False):
        error = refused(cpu_offload=value, offload_optimizer={"device": "cpu"})
        assert error.paths == ("zero_optimization.cpu_offload",)
    error = refused(cpu_offload_param=True, cpu_offload_params=True)
    assert error.paths == ("zero_optimization.cpu_offload_params",)
    found = load(cpu_offload=True, cpu_offload_use_pin_memory=True)
    assert [note.path for note in found.notes] == ["zero_optimization.cpu_offload_use_pin_memory"]


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_aio_with_something_on_nvme(section: str) -> None:
    aio = {"block_size": 2.0**18, "queue_depth": 8, "intra_op_parallelism": 4}
    found = load(aio=aio, **{section: nvme()})
    assert found.notes == ()
    assert found.config.aio == AioConfig(block_bytes=2**18, queue_depth=8, io_threads=4)
    assert load(aio={}, **{section: nvme()}).config.aio == AioConfig()


@pytest.mark.parametrize("key", section_keys(AIO), ids=lambda key: key.path)
def test_every_aio_key(key: Any) -> None:
    """With all the others left out: taken over, noted or refused; noted once for all without NVMe."""
    name = key.path.removeprefix("aio.")
    value = next(v for v in (8192, True, False, 3) if key.value_type.fits(v) and key.asks_for_something(v))
    value = 3 if name in ("queue_depth", "intra_op_parallelism") else value
    source = {name: value}
    for zero in ({}, {"offload_param": {"device": "cpu"}, "cpu_offload": True}):
        idle = load(aio=source, **zero)
        assert [(note.path, note.why) for note in idle.notes] == [("aio", "nothing is offloaded to NVMe")]
        assert idle.config.aio == AioConfig()
    if key.fate == "unsupported":
        assert refused(aio=source, offload_optimizer=nvme()).paths == (key.path,)
        return
    found = load(aio=source, offload_optimizer=nvme())
    if key.fate == "no effect":
        assert [(note.path, note.why) for note in found.notes] == [(key.path, key.why)]
        assert found.config.aio == AioConfig()
    else:
        assert found.notes == ()
        assert getattr(found.config.aio, key.native.removeprefix("aio.")) == key.native_value(value)


def test_aio_is_noted_once() -> None:
    aio = {key.path.removeprefix("aio."): 1 for key in section_keys(AIO) if key.value_type.fits(1)} | {
        "use_gds": True
    }
    assert [note.path for note in load(aio=aio).notes] == ["aio"]
    assert load(aio={}).notes == ()
    assert load_deepspeed_config({"gradient_clipping": 0, "aio": None}).notes == ()


@pytest.mark.parametrize(
    ("aio", "path", "fragment"),
    [
        ({"block_size": 1000}, "aio.block_size", "a multiple of 4096"),
        ({"queue_depth": 4096}, "aio.queue_depth", "from 1 to 1024"),
        ({"intra_op_parallelism": 32}, "aio.intra_op_parallelism", "from 1 to 16"),
        ({"queue_depth": 0}, "aio.queue_depth", "at least 1"),
        ({"use_gds": "yes"}, "aio.use_gds", "expected true or false"),
        ({"queue_depth": "auto"}, "aio.queue_depth", "expected a value, got 'auto'"),
        ({"queue_dept": 1}, "aio.queue_dept", "Did you mean aio.queue_depth"),
        ("auto", "aio", "expected a mapping"),
        (True, "aio", "expected a mapping"),
    ],
)
def test_mistakes_of_aio(aio: object, path: str, fragment: str) -> None:
    error = refused(aio=aio, offload_optimizer=nvme())
    assert error.paths == (path,)
    assert fragment in str(error)


def test_what_is_written_comes_back_from_the_mapping() -> None:
    config = load(offload_param=nvme("/a"), offload_optimizer=nvme("/b"), aio={"queue_depth": 7}).config
    assert ZeroConfig.from_mapping(config.to_mapping()) == config


def test_keys_are_deepspeeds() -> None:
    """The field names of DeepSpeed 0.19.8's offload_config.py and aio_config.py, and old thread_count."""
    wanted = {
        PARAM: "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
        OPTIMIZER: "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio "
        "super_offload cpuadam_cores_perc",
        "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events "
        "use_gds",
    }
    for section, names in wanted.items():
        found = {path.rpartition(".")[2] for path in KEYS if path.rpartition(".")[0] == section}
        assert found == set(names.split())
