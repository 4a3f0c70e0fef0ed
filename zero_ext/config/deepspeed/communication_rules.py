"""ZeRO++ and MiCS keys of DeepSpeed's JSON."""

from __future__ import annotations

from zero_ext.config.schema.config_errors import Problem, show

from .resolve_auto import Settled

_ROOT = "zero_optimization"


def set_communication(settled: Settled, native: dict[str, object]) -> None:
    """Codes on the wire, secondary shards and sharding groups, in the stages that have them."""
    stage = settled.values.get(f"{_ROOT}.stage", 0)
    if stage in (2, 3) and settled.values.get(f"{_ROOT}.zero_quantized_gradients") is True:
        native["communication.quantized_gradients"] = "int4"
    if stage != 3:
        return
    if settled.values.get(f"{_ROOT}.zero_quantized_weights") is True:
        native["communication.quantized_weights"] = "int8"
    node = settled.values.get(f"{_ROOT}.zero_hpz_partition_size", 1)
    if isinstance(node, int | float) and node > 1:
        native["communication.secondary_shards"] = True
        native["communication.ranks_per_node"] = node
    group = settled.values.get(f"{_ROOT}.mics_shard_size", -1)
    if isinstance(group, int | float) and group != -1:
        native["communication.sharding_ranks"] = group
        _check_group(group, settled, native)


def _check_group(group: float, settled: Settled, native: dict[str, object]) -> None:
    path = settled.written[f"{_ROOT}.mics_shard_size"]
    others = {
        "zero_quantized_gradients": "communication.quantized_gradients",
        "zero_hpz_partition_size": "communication.secondary_shards",
    }
    found = [name for name, key in others.items() if key in native]
    if group == 0:
        settled.problems.append(Problem(path, "got 0, wanted -1 for none or the ranks of a sharding group"))
    elif found:
        settled.problems.append(
            Problem(path, f"got {show(group)} together with {found[0]}; they are not combined: remove one")
        )
