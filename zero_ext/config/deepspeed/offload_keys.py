"""DeepSpeed keys of host and NVMe tiers: offload_param, offload_optimizer, their old forms, and aio."""

from __future__ import annotations

from .key import FLAG, Fate, Key, ValueType, choice, integer, number, or_null

PARAM = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"
AIO = "aio"

_PATH = ValueType("a path", lambda value: isinstance(value, str) and bool(value) and "\0" not in value)
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_PINNED = "host memory is always pinned if there is an accelerator, and pinning has no use without one"
_STAGING = "staging buffers have the size that a step needs"
_OVERLAP = "reads, updates and writes of different chunks always overlap"


def _device(section: str, native: str, why: str) -> Key:
    return Key(f"{section}.device", choice(*_TIERS), "supported", why, native, ("none",), words=_TIERS)


def _field(
    section: str,
    name: str,
    value_type: ValueType,
    fate: Fate,
    why: str,
    harmless: tuple[object, ...] = (),
    native: str = "",
) -> Key:
    """Return a key of a section that acts while the section names a device."""
    path, switch = f"{section}.{name}", f"{section}.device"
    return Key(path, value_type, fate, why, native, harmless, auto=True, switch=switch)


def _aio(name: str, value_type: ValueType, fate: Fate, why: str, *harmless: object, native: str = "") -> Key:
    return Key(f"{AIO}.{name}", value_type, fate, why, native, harmless)


_NVME_PATH = "folder to add to offload.nvme_paths. It is required by device 'nvme'"

PARAM_KEYS = (
    _device(
        PARAM,
        "offload.params",
        "tier of parameter shards, in stage 3 only. The value cpu means the tier host",
    ),
    _field(PARAM, "nvme_path", or_null(_PATH), "supported", _NVME_PATH),
    _field(PARAM, "buffer_count", integer(0), "no effect", _STAGING),
    _field(PARAM, "buffer_size", integer(0), "no effect", f"{_STAGING}, independent of the largest tensor"),
    _field(
        PARAM,
        "max_in_cpu",
        integer(0),
        "no effect",
        "host memory stores only those parameters from NVMe that are being transferred",
    ),
    _field(PARAM, "pin_memory", FLAG, "no effect", _PINNED, (False,)),
)

OPTIMIZER_KEYS = (
    _device(
        OPTIMIZER,
        "offload.optimizer",
        "tier of master weights and optimizer state, in stages 1 to 3. The value cpu means the tier host. "
        "In stages 2 and 3 cpu and nvme also store gradients in the tier host, as in DeepSpeed",
    ),
    _field(OPTIMIZER, "nvme_path", or_null(_PATH), "supported", _NVME_PATH),
    _field(
        OPTIMIZER,
        "buffer_count",
        integer(0),
        "no effect",
        "optimizer state streams through one buffer of offload.staging_buffer_bytes (native key)",
    ),
    _field(OPTIMIZER, "pin_memory", FLAG, "no effect", _PINNED, (False,)),
    _field(OPTIMIZER, "pipeline_read", FLAG, "no effect", _OVERLAP, (True,)),
    _field(OPTIMIZER, "pipeline_write", FLAG, "no effect", _OVERLAP, (True,)),
    _field(
        OPTIMIZER,
        "fast_init",
        FLAG,
        "no effect",
        "state is always written to its tier once, at set-up",
        (False,),
    ),
    _field(
        OPTIMIZER,
        "ratio",
        number(0, 1),
        "supported",
        "largest fraction of the optimizer's elements to offload, in stages 1 to 3. Units are not split, "
        "so the actual fraction may be smaller. 0 means device 'none'",
        native="offload.ratio",
    ),
    _field(
        OPTIMIZER,
        "super_offload",
        FLAG,
        "unsupported",
        "Set it to false or remove it. Its speculative step is available as the native key "
        "offload.update_mode 'in_backward'",
        (False,),
    ),
    _field(
        OPTIMIZER,
        "cpuadam_cores_perc",
        number(0, 1),
        "no effect",
        "it applies to super_offload, which is unsupported",
    ),
)


def _old(name: str, section: str, *aliases: str) -> Key:
    return Key(
        f"zero_optimization.{name}",
        or_null(FLAG),
        "supported",
        f"old form of {section.rpartition('.')[2]}.device. The value true means 'cpu'",
        harmless=(False, None),
        auto=True,
        aliases=tuple(f"zero_optimization.{alias}" for alias in aliases),
    )


OLD_KEYS = (
    _old("cpu_offload", OPTIMIZER),
    _old("cpu_offload_param", PARAM, "cpu_offload_params"),
    Key(
        "zero_optimization.cpu_offload_use_pin_memory",
        or_null(FLAG),
        "no effect",
        _PINNED,
        harmless=(False, None),
        auto=True,
    ),
)

# The section of each old flag.
OLD_FORMS = {OLD_KEYS[0].path: OPTIMIZER, OLD_KEYS[1].path: PARAM}

_BATCHED = "blocks are submitted whenever the queue has space"

AIO_KEYS = (
    _aio(
        "block_size",
        integer(1),
        "supported",
        "largest size of a transfer in bytes, a multiple of 4096. The default is 1,048,576",
        native="aio.block_bytes",
    ),
    _aio(
        "queue_depth",
        integer(1),
        "supported",
        "largest number of blocks in flight per I/O thread, at most 1024. The default is 32",
        native="aio.queue_depth",
    ),
    _aio(
        "intra_op_parallelism",
        integer(1),
        "supported",
        "number of threads that submit blocks, at most 16. The default is 1",
        native="aio.io_threads",
    ),
    _aio(
        "thread_count",
        integer(1),
        "no effect",
        "DeepSpeed 0.19 does not read it either. Set intra_op_parallelism",
    ),
    _aio("single_submit", FLAG, "no effect", _BATCHED, False),
    _aio(
        "overlap_events",
        FLAG,
        "no effect",
        "completions are always processed while blocks are submitted",
        True,
    ),
    Key(
        f"{AIO}.use_gds",
        FLAG,
        "supported",
        "whether to use GPUDirect Storage (true means auto, false means off). If it is unavailable, a log "
        "line gives the reason",
        native="aio.gpu_direct_storage",
        words={"true": "auto", "false": "off"},
    ),
)

OFFLOAD_KEYS = PARAM_KEYS + OPTIMIZER_KEYS + OLD_KEYS
