"""The documented knobs of each peer and the settings that a sweep tries in addition to the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.contenders import Contender
from benchmarks.peers.tuned_settings import Settings


@dataclass(frozen=True)
class Knob:
    """One knob, or several that have an effect in combination, and settings other than the default."""

    name: str
    alternatives: tuple[Settings, ...]


def _knob(name: str, *values: Any) -> Knob:
    return Knob(name.rpartition(".")[2], tuple({name: value} for value in values))


_DDP = (
    _knob("bucket_cap_mb", 1, 100, 1000),
    _knob("gradient_as_bucket_view", False),
    _knob("static_graph", True),
)


def _fsdp2(options: dict[str, Any]) -> Sequence[Knob]:
    last = (_knob("reshard_last_layer", False),) if options["reshard_after_forward"] else ()
    return (
        _knob("separate_groups", True),
        *last,
        _knob("forward_prefetch", 1, 2),
        _knob("backward_prefetch", 1, 2),
    )


_ZERO = "zero_optimization"
_BUCKETS = (5_000_000, 50_000_000)


def _deepspeed(options: dict[str, Any]) -> Sequence[Knob]:
    stage, tier = options["stage"], options.get("optimizer", "device")
    knobs = [
        _knob(f"{_ZERO}.reduce_bucket_size", *_BUCKETS),
        # The default overlaps in stage 3 only.
        _knob(f"{_ZERO}.overlap_comm", stage < 3),
        _knob(f"{_ZERO}.contiguous_gradients", False),
    ]
    if stage < 3:
        return (*knobs, _knob(f"{_ZERO}.allgather_bucket_size", *_BUCKETS))
    knobs += [
        _knob(f"{_ZERO}.stage3_prefetch_bucket_size", 0, 5_000_000, 500_000_000),
        _knob(f"{_ZERO}.stage3_max_live_parameters", 10_000_000, 100_000_000),
        _knob(f"{_ZERO}.stage3_param_persistence_threshold", 0, 1_000_000),
        _knob(f"{_ZERO}.sub_group_size", 10_000_000, 100_000_000),
    ]
    if tier != "device":
        knobs.append(_knob(f"{_ZERO}.offload_optimizer.pin_memory", False))
    if tier == "nvme":
        read, write = (f"{_ZERO}.offload_optimizer.pipeline_{direction}" for direction in ("read", "write"))
        knobs += [
            Knob("pipeline_read, pipeline_write", ({read: True, write: True}, {read: True}, {write: True})),
            _knob("aio.block_size", 262_144, 8_388_608),
            _knob("aio.queue_depth", 32, 128),
            # DeepSpeed's older name is thread_count.
            _knob("aio.intra_op_parallelism", 2, 4),
        ]
    if options.get("params") == "nvme":
        knobs.append(_knob(f"{_ZERO}.offload_param.pin_memory", False))
    return tuple(knobs)


def knobs_of(contender: Contender) -> Sequence[Knob]:
    """The knobs of a peer in the order of a sweep.

    ValueError for a contender that is no peer or whose settings are those of another one.
    """
    match contender.family:
        case "ddp":
            return _DDP
        case "fsdp2" if "rule" not in contender.options:
            return _fsdp2(contender.options)
        case "deepspeed" if "rule" not in contender.options:
            return _deepspeed(contender.options)
    raise ValueError(f"contender: expected one with settings of its own, got {contender.key!r}.")
