"""ZeRO++ and MiCS keys of DeepSpeed's JSON."""

from __future__ import annotations

from zero_ext.config.config_errors import Problem, show

from .resolve_auto import ResolvedKeys

_ROOT = "zero_optimization"


def set_communication(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set quantized communication, secondary shards and sharding groups, in the stages that support them."""
    stage = resolved.values.get(f"{_ROOT}.stage", 0)
    if stage in (2, 3) and resolved.values.get(f"{_ROOT}.zero_quantized_gradients") is True:
        native["communication.quantized_gradients"] = "int4"
    if stage != 3:
        return
    if resolved.values.get(f"{_ROOT}.zero_quantized_weights") is True:
        native["communication.quantized_weights"] = "int8"
    node = resolved.values.get(f"{_ROOT}.zero_hpz_partition_size", 1)
    if isinstance(node, int | float) and node > 1:
        native["communication.hierarchical_partition"] = True
        native["communication.ranks_per_node"] = node
    group = resolved.values.get(f"{_ROOT}.mics_shard_size", -1)
    if isinstance(group, int | float) and group != -1:
        native["communication.shard_group_size"] = group
        _check_group(group, resolved, native)


def _check_group(group: float, resolved: ResolvedKeys, native: dict[str, object]) -> None:
    path = resolved.written[f"{_ROOT}.mics_shard_size"]
    others = {
        "zero_quantized_gradients": "communication.quantized_gradients",
        "zero_hpz_partition_size": "communication.hierarchical_partition",
    }
    found = [name for name, key in others.items() if key in native]
    if group == 0:
        text = "expected -1 for none or the ranks of a sharding group, got 0. Set it to one of them."
        resolved.problems.append(Problem(path, text))
    elif found:
        resolved.problems.append(
            Problem(path, f"got {show(group)} together with {found[0]}, which are not combined. Remove one.")
        )
