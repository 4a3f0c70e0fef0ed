"""The description of a unit that plans are made from, before the unit exists."""

from __future__ import annotations

from dataclasses import dataclass

from zero_ext.config.buffer_sizes import payload_bytes
from zero_ext.config.communication import CODE_BITS, CodeDtype
from zero_ext.config.offload import StatePlacement


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Sizes and placement of a unit, and when a step uses it.

    Parameters are numbered in the order of registration.

    Attributes:
        name: Name of the unit.
        numel: Elements, padding included.
        itemsize: Bytes of an element.
        world_size: Ranks that share it, and so shards.
        placement: Which of its state is sharded, and the tiers.
        gathered: First and last parameter of the module that needs the unit, which is gathered meanwhile.
        grads_start: Parameter from which on its gradients are computed in backward.
        grads_end: First and last parameter at which its last gradient may be computed; None without any.
        replicas: Groups of ranks that each have all shards.
        is_float: Only such units are gathered in quantized form.
        rereads: Whether backward gathers it again.
        shared_bytes: Bytes of parameters that several modules share.
        largest_bytes: Bytes of its largest parameter.
        persistent: Whether its parameters stay gathered because they are small.
        first_parameter: Its first parameter. It is -1 for persistent units and for sharded ones outside
            blocks: the model's own, and those of several modules.
    """

    name: str
    numel: int
    itemsize: int
    world_size: int
    placement: StatePlacement
    gathered: tuple[int, int]
    grads_start: int
    grads_end: tuple[int, int] | None
    replicas: int = 1
    is_float: bool = True
    rereads: bool = True
    shared_bytes: int = 0
    largest_bytes: int = 0
    persistent: bool = False
    first_parameter: int = -1

    @property
    def trained(self) -> bool:
        """Return whether it has master weights and gradients."""
        return self.grads_end is not None

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world_size

    @property
    def owned_numel(self) -> int:
        """Elements with optimizer state on one rank."""
        return self.shard_numel if self.placement.optimizer else self.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the full flat buffer."""
        return self.numel * self.itemsize

    def payload_bytes(self, codes: CodeDtype) -> int:
        """Return the bytes of all shards quantized to ``codes``."""
        return self.world_size * payload_bytes(self.shard_numel, CODE_BITS[codes])
