"""Bytes of model state on each rank (ZeRO, Rajbhandari et al. 2020, section 3.1 and figure 1).

With P parameters in 16 bits, Adam's two fp32 moments and N ranks: 16P, 4P + 12P/N, 2P + 14P/N and 16P/N
bytes in stages 0 to 3. Activations and the buffers of units gathered for a moment are not model state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_ext.config.buffer_sizes import BYTES_OF_DTYPE, block_count
from zero_ext.config.communication import CommunicationConfig
from zero_ext.config.offload import StatePlacement

MOMENTS = ("fp32", "bf16", "8bit")


@dataclass(frozen=True)
class TrainingState:
    """The state that training keeps of a model, in elements by dtype (`fp32`, `bf16` or `fp16`).

    Elements are best the padded ones that the engine's units hold; then the bytes are exact. Parameters below
    the persistence threshold in stage 3 cost what stage 2 costs: sum the two.

    Attributes:
        trainable: elements of parameters with gradients and optimizer state.
        frozen: elements of parameters without.
        moments: optimizer state tensors as large as their parameter (Adam 2, SGD with momentum 1, plain 0).
        moments_dtype: dtype of these; "8bit" takes a byte per element and four per block of 256. The engine
            counts blocks in each unit on its own, so every further unit may add one block per moment.
        grad_accum_dtype: dtype that gradients add up in over several micro-batches.
        accumulation_steps: micro-batches of a step. With one, gradients stay in compute precision.

    Raises:
        ValueError: a dtype or count does not exist.
    """

    trainable: Mapping[str, int]
    frozen: Mapping[str, int] = field(default_factory=dict)
    moments: int = 2
    moments_dtype: str = "fp32"
    grad_accum_dtype: str = "fp32"
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name, counts in (("trainable", self.trainable), ("frozen", self.frozen)):
            for dtype, elements in counts.items():
                _bytes_of(name, dtype)
                check_count(f"{name}[{dtype!r}]", elements, 0)
        if self.moments_dtype not in MOMENTS:
            raise ValueError(
                f"moments_dtype: expected one of {', '.join(MOMENTS)}, got {self.moments_dtype!r}. Choose "
                "one of them."
            )
        _bytes_of("grad_accum_dtype", self.grad_accum_dtype)
        check_count("moments", self.moments, 0)
        check_count("accumulation_steps", self.accumulation_steps, 1)


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank by state kind.

    Attributes:
        params: parameters in compute precision.
        grads: gradients.
        optimizer: fp32 master weights and moments.
    """

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all three kinds."""
        return self.params + self.grads + self.optimizer


def model_state_bytes(
    stage: int, world_size: int, state: TrainingState, *, no_sync: bool = False, delayed: bool = False
) -> StateBytes:
    """Return the bytes of model state that one rank keeps.

    A shard is a rank's N-th slice, rounded up to whole elements. fp32 parameters are their own master
    weights.

    Source: ZeRO, Rajbhandari et al. (arXiv 1910.02054), section 3.1 and figure 1.

    Args:
        stage: ZeRO stage, 0 to 3.
        world_size: number of ranks.
        state: elements by dtype.
        no_sync: gradients are reduced once per step, after all its micro-batches. Each rank then holds the
            full accumulated gradient, and the shard that it is reduced into where gradients are sharded.
        delayed: delayed updates read gradients of their own, and have master weights besides fp32 parameters
            too. The buffer for updated parameters that they need with the optimizer on NVMe is not counted
            here.

    Returns:
        Bytes by state kind.

    Raises:
        ValueError: a stage, world size, dtype or count that does not exist.

    Examples:
        >>> from zero_ext.plan import TrainingState, model_state_bytes
        >>> state = TrainingState({"bf16": 7_000_000_000})  # 7B parameters, Adam
        >>> [model_state_bytes(stage, 64, state).total // 10**9 for stage in range(4)]
        [112, 29, 15, 1]
    """
    check_count("world_size", world_size, 1)
    placement = StatePlacement.of_stage(stage).on_ranks(world_size)
    params = grads = optimizer = 0
    for dtype, elements in state.frozen.items():
        params += _shard_elements(elements, placement.params, world_size) * BYTES_OF_DTYPE[dtype]
    for dtype, elements in state.trainable.items():
        width = BYTES_OF_DTYPE[dtype]
        accumulated = BYTES_OF_DTYPE[state.grad_accum_dtype]
        grad_width = accumulated if state.accumulation_steps > 1 else width
        params += _shard_elements(elements, placement.params, world_size) * width
        grads += _shard_elements(elements, placement.grads, world_size) * grad_width
        if no_sync and placement.grads:
            grads += elements * accumulated
        owned = _shard_elements(elements, placement.optimizer, world_size)
        grads += owned * grad_width if delayed else 0
        optimizer += state.moments * _moment_bytes(owned, state.moments_dtype)
        optimizer += owned * 4 if dtype != "fp32" or delayed else 0
    return StateBytes(params, grads, optimizer)


def secondary_bytes(
    numel: int, world_size: int, communication: CommunicationConfig, bytes_per_element: int
) -> int:
    """Return the bytes that a rank keeps of the second copy of a unit's parameters, besides its shard.

    Every node keeps all parameters, in the codes or the precision that they are sent in.

    Source: ZeRO++, Wang et al. (arXiv 2306.10209), section 3.2.

    Args:
        numel: elements of the unit with padding.
        world_size: number of ranks.
        communication: quantization and nodes.
        bytes_per_element: of parameters.

    Returns:
        Bytes.
    """
    nodes = world_size // (communication.ranks_per_node or world_size)
    return communication.secondary_bytes(numel // world_size, bytes_per_element, nodes)


def check_count(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name}: expected an integer of at least {least}, got {value!r}. Pass a number in this range."
        )


def _shard_elements(elements: int, sharded: bool, world_size: int) -> int:
    return -(-elements // world_size) if sharded else elements


def _moment_bytes(elements: int, dtype: str) -> int:
    if dtype != "8bit":
        return elements * BYTES_OF_DTYPE[dtype]
    return elements + 4 * block_count(elements)


def _bytes_of(name: str, dtype: str) -> None:
    if dtype not in BYTES_OF_DTYPE:
        raise ValueError(
            f"{name}: expected one of {', '.join(BYTES_OF_DTYPE)}, got {dtype!r}. Choose one of them."
        )
