"""Tasks of a rank on resources that work simultaneously, and the seconds that each kind of task takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zero_ext.config.full_tensor_costs import MATMUL_SLOWDOWN
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.planned_units import MatrixStep
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES, Training
from zero_ext.plan.simulation.transformer_cost import UnitCost
from zero_ext.plan.step_traffic import SUM_BYTES

COMPUTE, LINK, TO_DEVICE, TO_HOST = "compute", "collectives", "to device", "to host"
READ, WRITE, HOST = "NVMe read", "NVMe write", "host update"
NVME = "NVMe"
# Of every byte that is kept for backward, a forward writes one and reads one; backward reads it, and writes
# and reads a gradient of it twice as often.
FORWARD_TRAFFIC = 2
BACKWARD_TRAFFIC = 4


@dataclass(frozen=True)
class TaskSpan:
    """One task as it ran, times in seconds."""

    name: str
    resource: str
    begin: float
    end: float


class Timeline:
    """A schedule that grows task by task.

    A task begins when its resource has ended the one handed over before and all tasks that it comes after
    have ended, as on the streams of a device. All times are sums and maxima of durations, so a shorter
    task never makes anything later. Resources of ``merged`` are another one.
    """

    def __init__(self, merged: Mapping[str, str] | None = None) -> None:
        self._merged = merged or {}
        self.spans: list[TaskSpan] = []
        self.busy: dict[str, float] = {}
        self._free: dict[str, float] = {}

    @property
    def end(self) -> float:
        """The time when the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    def add(self, name: str, resource: str, seconds: float, after: Iterable[int] = ()) -> int:
        """Hand a task over and return its number, by which later ones name it in ``after``."""
        resource = self._merged.get(resource, resource)
        begin = self._free.get(resource, 0.0)
        for number in after:
            begin = max(begin, self.spans[number].end)
        self.spans.append(TaskSpan(name, resource, begin, begin + seconds))
        self._free[resource] = begin + seconds
        self.busy[resource] = self.busy.get(resource, 0.0) + seconds
        return len(self.spans) - 1


def merged_resources(hardware: Hardware, training: Training) -> dict[str, str]:
    """Return the resources that are one on ``hardware``.

    Where the device is the host all but NVMe is one processor; delayed updates have a thread of their own
    there, so they are taken to find cores of their own.
    """
    merged = {READ: NVME, WRITE: NVME} if hardware.nvme_half_duplex else {}
    if hardware.device_is_host:
        merged |= dict.fromkeys((LINK, TO_DEVICE, TO_HOST), COMPUTE)
        if training.update_mode != "delayed":
            merged[HOST] = COMPUTE
    return merged


_NO_MATRICES = MatrixStep()


class Costs:
    """Durations on ``hardware`` in ``training``; one method for each kind of task, all in seconds.

    ``matrices`` are those that the step works on in full.
    """

    def __init__(
        self, hardware: Hardware, training: Training, sequence: int, matrices: MatrixStep = _NO_MATRICES
    ) -> None:
        self.hardware = hardware
        self.matrices = matrices
        self.training = training
        self.placement = training.placement
        self.rates = hardware.for_rank(training.world_size)
        self.tokens = training.micro_batch * sequence
        own, rest = (training.state_bytes(training.rule_of(hidden)) for hidden in (True, False))
        self._state_bytes = matrices.share * own + (1 - matrices.share) * rest  # of an element, on average

    def forward(self, unit: UnitCost) -> float:
        """Matrix products, weights read, activations, launches."""
        saved = self.tokens * unit.activations
        moved = PARAMETER_BYTES * unit.parameters + FORWARD_TRAFFIC * saved
        return self._compute(self.flops(unit), moved) + unit.share * self.hardware.unit_seconds

    def backward(self, unit: UnitCost) -> float:
        """Two products for each of forward; weights read, gradients written and, where there are other ranks,
        moved into the unit's flat buffer; the forward again if it is recomputed."""
        saved = self.tokens * unit.activations
        passes = 2 if self.ranks(unit) == 1 else 4
        moved = passes * PARAMETER_BYTES * unit.parameters + BACKWARD_TRAFFIC * saved
        again = self.forward(unit) if self.recomputes(unit) else 0.0
        seconds = self._compute(2 * self.flops(unit), moved) + 2 * unit.share * self.hardware.unit_seconds
        return seconds + again

    def ranks(self, unit: UnitCost) -> int:
        """Return the ranks that share a unit."""
        return self.training.world_size // unit.spread

    def owned(self, unit: UnitCost, sharded: bool) -> int:
        """Return the elements of a unit that a rank has: of its shard, or all."""
        return self.training.among(unit.spread).owned(unit.parameters, sharded)

    def exchange(self, unit: UnitCost) -> float:
        """Return one all-to-all of the tokens of a unit with experts."""
        received = self.tokens * unit.exchanged * (unit.spread - 1) / unit.spread
        return self.rates.latency + received / self.rates.collective if received else 0.0

    def flops(self, unit: UnitCost) -> float:
        """FLOPs (no seconds) of a unit's forward of one micro-batch."""
        return self.tokens * unit.forward_flops

    def recomputes(self, unit: UnitCost) -> bool:
        """Return whether a unit's forward runs twice."""
        return unit.recomputes and self.training.activations != "saved"

    def collective(self, elements: int, itemsize: int, spread: int = 1) -> float:
        """Return one gather or reduce-scatter of ``elements``: a rank receives all but its own part.

        Of ``spread`` ranks each has other elements. Where parameters are not sharded, units go in buckets: a
        smaller one has its part of the latency.
        """
        ranks = self.training.world_size // spread
        if ranks == 1:
            return 0.0
        share = 1.0 if self.placement.params else min(1.0, elements / self.training.bucket_elements)
        return share * self.rates.latency + elements * itemsize * (ranks - 1) / ranks / self.rates.collective

    def reduce(self, elements: int, itemsize: int, spread: int = 1) -> float:
        """Return a reduce-scatter. Those of processors sum what all ranks sent of a shard in a pass of its
        own.
        """
        ranks, seconds = self.training.world_size // spread, self.collective(elements, itemsize, spread)
        if ranks > 1 and self.hardware.device_is_host:
            seconds += elements * itemsize * (1 + 1 / ranks) / self.rates.device
        return seconds

    def to_device(self, nbytes: float) -> float:
        """Return a copy from host memory."""
        return nbytes / self.rates.to_device

    def to_host(self, nbytes: float) -> float:
        """Return a copy to host memory."""
        return nbytes / self.rates.to_host

    def accumulate(self, elements: int, rate: float) -> float:
        """Return a gradient added to what there is in fp32: one read, one read and written."""
        return elements * (PARAMETER_BYTES + 2 * 4) / rate

    def norm(self, elements: int) -> float:
        """Squares of the gradients summed, one small sum over the ranks."""
        rates = {"device": self.rates.device, "host": self.rates.host, "nvme": self.rates.nvme_read}
        latency = self.rates.latency if self.training.world_size > 1 else 0.0
        return elements * self.training.gradient_bytes / rates[self.training.grads] + latency

    def orthogonalize(self, share: float) -> float:
        """Return a ``share`` of the iterations on the matrices of the owner that has most to do."""
        return share * self.matrices.flops * MATMUL_SLOWDOWN[self.training.ns_dtype] / self.rates.matmul

    def to_owners(self, share: float) -> float:
        """Return a ``share`` of the way of all matrices to their owners, which is as long as the way back."""
        if not self.matrices.sent:
            return 0.0
        received = share * self.matrices.sent * self.training.direction_bytes / self.training.world_size
        return share * self.rates.latency + received / self.rates.collective

    def add_lines(self) -> float:
        """Return the sums over rows and columns of what all ranks have, and then of each matrix."""
        if self.training.world_size == 1 or not (self.placement.optimizer and self.matrices.lines):
            return 0.0
        received = SUM_BYTES * self.matrices.lines * (self.training.world_size - 1)
        return 2 * self.rates.latency + received / self.rates.collective

    def update(self, elements: int) -> float:
        """Return one pass of the update: state read and written, gradient read, parameter written."""
        moved = 2 * self._state_bytes + self.training.gradient_bytes + PARAMETER_BYTES
        return (
            elements * moved / (self.rates.device if self.training.optimizer == "device" else self.rates.host)
        )

    def stored_state(self, elements: int) -> tuple[float, float]:
        """State read from NVMe and written back."""
        nbytes = elements * self._state_bytes
        return nbytes / self.rates.nvme_read, nbytes / self.rates.nvme_write

    def _compute(self, flops: float, moved: float) -> float:
        return flops / self.rates.matmul + moved / self.rates.device
