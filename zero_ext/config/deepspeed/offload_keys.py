"""Host and NVMe tiers of DeepSpeed's JSON: the keys of offload_param, offload_optimizer, their old forms, and
aio, and what depends on several of them."""

from __future__ import annotations

from pathlib import PurePath

from zero_ext.config.tiers import TIERS

from .deepspeed_keys import (
    FLAG,
    Key,
    ResolvedKeys,
    ValueType,
    choice,
    integer,
    no_effect,
    number,
    or_null,
    section,
    supported,
    unsupported,
)

PARAM = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"
AIO = "aio"

_PATH = ValueType("a path", lambda value: isinstance(value, str) and bool(value) and "\0" not in value)
_TIERS = {tier.deepspeed: name for name, tier in TIERS.items() if tier.deepspeed}
_PINNED = "host memory is always pinned if there is an accelerator, and pinning has no use without one"
_STAGING = "staging buffers have the size that a step needs"
_OVERLAP = "reads, updates and writes of different chunks always overlap"
_NVME_PATH = "folder to add to offload.nvme_paths. It is required by device 'nvme'"
_BATCHED = "blocks are submitted whenever the queue has space"


def _device(native: str, why: str) -> Key:
    return supported("device", choice(*_TIERS), why, native, harmless=("none",), words=_TIERS)


def _old(name: str, tier: str, *aliases: str) -> Key:
    why = f"old form of {tier.rpartition('.')[2]}.device. The value true means 'cpu'"
    return supported(name, or_null(FLAG), why, harmless=(False, None), auto=True, aliases=aliases)


# A table, whose rows need no line for each argument.
# fmt: off
_OFFLOAD_KEYS = (
    *section(
        PARAM,
        _device("offload.params",
            "tier of parameter shards, in stage 3 only. The value cpu means the tier host"),
        supported("nvme_path", or_null(_PATH), _NVME_PATH),
        no_effect("buffer_count", integer(0), _STAGING),
        no_effect("buffer_size", integer(0), f"{_STAGING}, independent of the largest tensor"),
        no_effect("max_in_cpu", integer(0),
            "host memory stores only those parameters from NVMe that are being transferred"),
        no_effect("pin_memory", FLAG, _PINNED, False),
        switch="device",
        auto=True,
    ),
    *section(
        OPTIMIZER,
        _device("offload.optimizer",
            "tier of master weights and optimizer state, in stages 1 to 3. The value cpu means the tier "
            "host. In stages 2 and 3 cpu and nvme also store gradients in the tier host, as in DeepSpeed"),
        supported("nvme_path", or_null(_PATH), _NVME_PATH),
        no_effect("buffer_count", integer(0),
            "optimizer state streams through one buffer of offload.staging_buffer_bytes (native key)"),
        no_effect("pin_memory", FLAG, _PINNED, False),
        no_effect("pipeline_read", FLAG, _OVERLAP, True),
        no_effect("pipeline_write", FLAG, _OVERLAP, True),
        no_effect("fast_init", FLAG, "state is always written to its tier once, at set-up", False),
        supported("ratio", number(0, 1),
            "largest fraction of the optimizer's elements to offload, in stages 1 to 3. Units are not split, "
            "so the actual fraction may be smaller. 0 means device 'none'", "offload.ratio"),
        unsupported("super_offload", FLAG,
            "Set it to false or remove it. Its speculative step is available as the native key "
            "offload.update_mode 'in_backward'", False),
        no_effect("cpuadam_cores_perc", number(0, 1), "it applies to super_offload, which is unsupported"),
        switch="device",
        auto=True,
    ),
    *section(
        "zero_optimization",
        _old("cpu_offload", OPTIMIZER),
        _old("cpu_offload_param", PARAM, "cpu_offload_params"),
        no_effect("cpu_offload_use_pin_memory", or_null(FLAG), _PINNED, False, None, auto=True),
    ),
)

_AIO_KEYS = section(
    AIO,
    supported("block_size", integer(1),
        "largest size of a transfer in bytes, a multiple of 4096. The default is 1,048,576",
        "aio.block_bytes"),
    supported("queue_depth", integer(1),
        "largest number of blocks in flight per I/O thread, at most 1024. The default is 32",
        "aio.queue_depth"),
    supported("intra_op_parallelism", integer(1),
        "number of threads that submit blocks, at most 16. The default is 1", "aio.io_threads"),
    no_effect("thread_count", integer(1), "DeepSpeed 0.19 does not read it either. Set intra_op_parallelism"),
    no_effect("single_submit", FLAG, _BATCHED, False),
    no_effect("overlap_events", FLAG, "completions are always processed while blocks are submitted", True),
    supported("use_gds", FLAG,
        "whether to use GPUDirect Storage (true means auto, false means off). If it is unavailable, a log "
        "line gives the reason", "aio.gpu_direct_storage", words={"true": "auto", "false": "off"}),
)
# fmt: on

TIER_KEYS = _OFFLOAD_KEYS + _AIO_KEYS


def normalize_tiers(resolved: ResolvedKeys) -> None:
    """Convert old flags and a ratio of zero to their new form, check the sections, and note ignored keys.

    Removes the `aio` section if nothing is stored on NVMe. Adds a problem for a device 'nvme' without an
    nvme_path.
    """
    for name, tier in (("cpu_offload", OPTIMIZER), ("cpu_offload_param", PARAM)):
        _apply_old_flag(f"zero_optimization.{name}", tier, resolved)
    if resolved.values.get(f"{OPTIMIZER}.ratio") == 0:
        resolved.values[f"{OPTIMIZER}.device"] = "none"
    if resolved.stage != 3 and _device_of(PARAM, resolved) != "none":
        # No parameter is sharded, and DeepSpeed does not read the section.
        written = resolved.written[f"{PARAM}.device"].removesuffix(".device")
        resolved.drop(PARAM)
        resolved.note(written, f"it acts in stage 3, and the stage is {resolved.stage}")
    for tier in (PARAM, OPTIMIZER):
        device, path = _device_of(tier, resolved), f"{tier}.nvme_path"
        nvme_path = resolved.values.get(path)
        if device == "nvme" and nvme_path is None:
            resolved.add_problem(
                path, "the required key is missing: device is 'nvme'. Name a folder on an NVMe device."
            )
        elif device == "cpu" and nvme_path is not None:
            resolved.note(path, "device is 'cpu'")
    if not _on_nvme(resolved) and resolved.drop(AIO):
        resolved.note(AIO, "nothing is offloaded to NVMe")


def set_tiers(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set the native values that depend on both sections: the folders, and the tier of gradients."""
    folders: dict[PurePath, str] = {}
    for tier in _on_nvme(resolved):
        path = resolved.values.get(f"{tier}.nvme_path")
        if path is not None:
            folders.setdefault(PurePath(path), path)
    if folders:
        native["offload.nvme_paths"] = list(folders.values())
    if _device_of(OPTIMIZER, resolved) != "none" and native["stage"] in (2, 3):
        native["offload.grads"] = "host"


def _device_of(tier: str, resolved: ResolvedKeys) -> str:
    return str(resolved.values.get(f"{tier}.device", "none")).lower()


def _on_nvme(resolved: ResolvedKeys) -> list[str]:
    return [tier for tier in (PARAM, OPTIMIZER) if _device_of(tier, resolved) == "nvme"]


def _apply_old_flag(path: str, tier: str, resolved: ResolvedKeys) -> None:
    """Convert an old flag to the device of its section. Both forms together are an error, as in DeepSpeed."""
    value = resolved.values.get(path)
    if value is None:
        return
    written = resolved.written[path]
    if any(name.startswith(f"{tier}.") for name in resolved.values):
        resolved.add_problem(written, f"it is the old form of {tier}. Keep one of the two.")
    elif value is True:
        resolved.values[f"{tier}.device"] = "cpu"
        resolved.written[f"{tier}.device"] = written
