"""DeepSpeed keys of host and NVMe tiers: offload_param, offload_optimizer, their old forms, and aio."""

from __future__ import annotations

from .key import FLAG, Fate, Key, ValueType, choice, integer, number, or_null

PARAM = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"
AIO = "aio"

_PATH = ValueType("a path", lambda value: isinstance(value, str) and bool(value) and "\0" not in value)
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_PINNED = "with an accelerator, host memory is always pinned; without one there is nothing to pin it for"
_STAGING = "staging is sized by what a step needs"
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


_NVME_PATH = "joins offload.nvme_paths; required by device 'nvme'"

PARAM_KEYS = (
    _device(PARAM, "offload.params", "cpu is the tier host; no effect below stage 3"),
    _field(PARAM, "nvme_path", or_null(_PATH), "supported", _NVME_PATH),
    _field(PARAM, "buffer_count", integer(0), "no effect", _STAGING),
    _field(PARAM, "buffer_size", integer(0), "no effect", f"{_STAGING}, never by the largest tensor"),
    _field(
        PARAM,
        "max_in_cpu",
        integer(0),
        "no effect",
        "of parameters on NVMe, host memory holds only those being moved",
    ),
    _field(PARAM, "pin_memory", FLAG, "no effect", _PINNED, (False,)),
)

OPTIMIZER_KEYS = (
    _device(
        OPTIMIZER,
        "offload.optimizer",
        "cpu is the tier host; stages 1 to 3. In stages 2 and 3 gradients then live on the tier host, as in "
        "DeepSpeed",
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
        OPTIMIZER, "fast_init", FLAG, "no effect", "state is written to its tier once, at set-up", (False,)
    ),
    _field(
        OPTIMIZER,
        "ratio",
        number(0, 1),
        "supported",
        "stages 1 to 3; by whole units, met from below; 0 is device 'none'",
        native="offload.ratio",
    ),
    _field(
        OPTIMIZER,
        "super_offload",
        FLAG,
        "unsupported",
        "Set it to false or remove it. The native key offload.update_mode 'in_backward' is its speculative "
        "step",
        (False,),
    ),
    _field(
        OPTIMIZER,
        "cpuadam_cores_perc",
        number(0, 1),
        "no effect",
        "it belongs to super_offload, which does not exist here",
    ),
)


def _old(name: str, section: str, *aliases: str) -> Key:
    return Key(
        f"zero_optimization.{name}",
        or_null(FLAG),
        "supported",
        f"old form: true is {section.rpartition('.')[2]}.device 'cpu'",
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

_BATCHED = "blocks are handed over as the queue has space"

AIO_KEYS = (
    _aio(
        "block_size",
        integer(1),
        "supported",
        "bytes, a multiple of 4096; 1,048,576 when missing",
        native="aio.block_bytes",
    ),
    _aio("queue_depth", integer(1), "supported", "at most 1024; 32 when missing", native="aio.queue_depth"),
    _aio(
        "intra_op_parallelism",
        integer(1),
        "supported",
        "submitting threads, at most 16; 1 when missing",
        native="aio.io_threads",
    ),
    _aio(
        "thread_count",
        integer(1),
        "no effect",
        "DeepSpeed 0.19 does not read it either; write intra_op_parallelism",
    ),
    _aio("single_submit", FLAG, "no effect", _BATCHED, False),
    _aio(
        "overlap_events", FLAG, "no effect", "completions are always taken while blocks are submitted", True
    ),
    Key(
        f"{AIO}.use_gds",
        FLAG,
        "supported",
        "true is auto: where GPUDirect Storage cannot be had, a log line says why; false is off",
        native="aio.gpu_direct_storage",
        words={"true": "auto", "false": "off"},
    ),
)

OFFLOAD_KEYS = PARAM_KEYS + OPTIMIZER_KEYS + OLD_KEYS
