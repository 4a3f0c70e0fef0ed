"""DeepSpeed's memory estimators, with the bytes that this engine keeps (``zero_ext.plan``)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import nn

from zero_ext.plan import TrainingState, model_state_bytes

_GIB = 2**30


class _Option(NamedTuple):
    """A placement to print: ``offload`` the optimizer to host memory, ``params`` too."""

    offload: bool
    params: bool

    @property
    def words(self) -> str:
        optimizer = "offload_optimizer=cpu " if self.offload else "offload_optimizer=none"
        return f"offload_param={'cpu ' if self.params else 'none'}, {optimizer}"


_STAGE_2 = (_Option(True, False), _Option(False, False))
_STAGE_3 = (_Option(True, True), *_STAGE_2)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Return bytes of a host, of a GPU, and of the largest layer gathered with its gradient; 16-bit training
    with Adam.

    Bytes of a host and of a GPU are model states times ``additional_buffer_factor``; a GPU's hold the
    largest layer too. Without ``zero_init`` every rank builds the whole model in host memory first.
    """
    layer = 4 * largest_layer_params
    option = _Option(cpu_offload, cpu_offload_params)
    host, device = _needs(3, total_params, num_gpus_per_node, num_nodes, option)
    if not zero_init:
        host = max(host, 4 * total_params * num_gpus_per_node)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor) + layer, layer


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Return bytes of a host and of a GPU in stage 2; 16-bit training with Adam."""
    host, device = _needs(2, total_params, num_gpus_per_node, num_nodes, _Option(cpu_offload, False))
    host = max(host, 4 * total_params * num_gpus_per_node)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 2's needs of ``model`` for every placement."""
    total, _ = _sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 2's needs of a model of ``total_params`` parameters for every placement."""
    needs = partial(
        estimate_zero2_model_states_mem_needs,
        *(total_params, num_gpus_per_node, num_nodes),
        additional_buffer_factor=additional_buffer_factor,
    )
    rows = [(*needs(cpu_offload=each.offload), each.words.partition(", ")[2]) for each in _STAGE_2]
    _print(_title(total_params, 0, num_nodes, num_gpus_per_node), rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> None:
    """Print stage 3's needs of ``model`` for every placement."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print stage 3's needs of a model of these sizes for every placement."""
    needs = partial(
        estimate_zero3_model_states_mem_needs,
        *(total_params, largest_layer_params, num_gpus_per_node, num_nodes),
        additional_buffer_factor=additional_buffer_factor,
    )
    rows = [
        (
            *needs(cpu_offload=each.offload, cpu_offload_params=each.params, zero_init=built)[:2],
            f"{each.words}, zero_init={int(built)}",
        )
        for each in _STAGE_3
        for built in (True, False)
    ]
    _print(_title(total_params, largest_layer_params, num_nodes, num_gpus_per_node), rows)


def _needs(stage: int, total: int, gpus: int, nodes: int, option: _Option) -> tuple[int, int]:
    """Return bytes of model states on a host and on one of its GPUs."""
    rank = model_state_bytes(stage, gpus * nodes, TrainingState(trainable={"bf16": total}))
    far = 0
    if option.offload:
        # With the optimizer gradients go to the host as well.
        far += rank.optimizer + rank.grads
    if option.offload and option.params:
        far += rank.params
    return far * gpus, rank.total - far


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of the model, and of the module that owns most."""
    owned = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), max(owned, default=0)


def _title(total: int, largest: int, nodes: int, gpus: int) -> str:
    layer = f", largest layer {largest / 1e6:,.1f}M" if largest else ""
    return f"Model states of {total / 1e6:,.1f}M parameters{layer} on {nodes} node(s) of {gpus} GPU(s):"


def _print(title: str, rows: list[tuple[int, int, str]]) -> None:
    print(title)
    print("  per CPU  |  per GPU  |  Options")
    for host, device, words in rows:
        print(f"  {host / _GIB:6.2f}GB | {device / _GIB:7.2f}GB | {words}")
