"""The optimizer's part of a step: updates where the state lives, parameters to where they live."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from zero_ext.plan.simulation.costs import Costs
from zero_ext.plan.simulation.resources import COMPUTE, HOST, LINK, READ, TO_DEVICE, TO_HOST, WRITE
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES
from zero_ext.plan.simulation.transformer_cost import UnitCost

CHUNKS = 256  # of all updates through NVMe at most; the engine's chunks are smaller, which changes ends only
CHUNKS_IN_BUFFER = 8  # simultaneously, in the staging buffer
READ_AHEAD = 4
STATE = "write state"

AddTask = Callable[[str, str, float, Iterable[int]], int]
Write = tuple[str, float, list[int]]


class OptimizerSchedule:
    """Adds the tasks of updates by ``add``, one unit or all together.

    Writes to NVMe are handed over behind the reads that run ahead of them, as the engine's ring does it.
    """

    def __init__(self, units: Sequence[UnitCost], costs: Costs, add: AddTask) -> None:
        self._units = units
        self._costs = costs
        self._training = costs.training
        self._add = add
        placement = costs.placement
        self._placement = placement
        self._optimizer = placement.optimizer_tier if placement.optimizer else "device"
        self._grads = placement.grads_tier if placement.grads else "device"
        self._params = placement.params_tier if placement.params else "device"
        self.gradients_at = {"device": COMPUTE, "host": HOST, "nvme": READ}[self._grads]
        self._writes: deque[Write] = deque()
        self._written: deque[int] = deque(maxlen=CHUNKS_IN_BUFFER)
        self._stored: list[int] = []
        self._done: dict[int, list[int]] = {}

    def norm(self) -> float:
        """Return seconds of the global norm, if one is asked for."""
        if not self._training.clipping:
            return 0.0
        sharded = self._placement.grads or self._placement.optimizer
        return self._costs.norm(sum(self._training.owned(unit.parameters, sharded) for unit in self._units))

    def run_all(self, after: Sequence[int]) -> None:
        """Update all units, each after ``after``."""
        for number in range(len(self._units)):
            self._one(number, after)

    def run(self, number: int, after: Sequence[int]) -> list[int]:
        """Update one unit; return the tasks after which all of it is done, writes included."""
        self._stored = []
        done = self._one(number, after)
        self.end()
        return [*done, *self._stored]

    def publish_rest(self, after: Sequence[int]) -> None:
        """Finish the updates made before the end of the step: parameters that follow in the step itself."""
        if self._training.update_mode == "delayed" or not self._placement.params:
            for number in range(len(self._units)):
                self._publish(number, [*self._done.get(number, ()), *after])

    def end(self) -> None:
        """Hand over the writes that are left."""
        while self._writes:
            self._write()

    def _one(self, number: int, after: Sequence[int]) -> list[int]:
        elements = self._owned(number)
        in_storage = self._optimizer == "nvme"
        done = (
            self._stream(number, elements, after) if in_storage else self._in_memory(number, elements, after)
        )
        self._done[number] = done
        if self._training.update_mode == "after_backward" or (
            self._training.update_mode == "in_backward" and self._placement.params
        ):
            return self._publish(number, done)
        return done

    def _in_memory(self, number: int, elements: int, after: Sequence[int]) -> list[int]:
        width, ready = self._training.gradient_bytes, list(after)
        if self._grads == "nvme":
            seconds = elements * width / self._costs.rates.nvme_read
            ready = [self._add(f"read gradient {number}", READ, seconds, ready)]
        if self._optimizer == "host" and self._grads == "device":
            ready = [self._add(f"gradient {number}", TO_HOST, self._costs.to_host(elements, width), ready)]
        if self._optimizer == "device" and self._grads != "device":
            ready = [
                self._add(f"gradient {number}", TO_DEVICE, self._costs.to_device(elements, width), ready)
            ]
        where = COMPUTE if self._optimizer == "device" else HOST
        return [self._add(f"update {number}", where, self._costs.update(elements), ready)]

    def _stream(self, number: int, elements: int, after: Sequence[int]) -> list[int]:
        """Read run ahead of updates; a chunk's buffer is free again once it is written."""
        chunks = -(-CHUNKS // len(self._units))
        read, write = (seconds / chunks for seconds in self._costs.stored_state(elements))
        update = self._costs.update(elements) / chunks
        width, done = self._training.gradient_bytes, []
        if self._grads == "nvme":
            read += elements * width / self._costs.rates.nvme_read / chunks
        for chunk in range(chunks):
            while len(self._writes) > READ_AHEAD:
                self._write()
            freed = self._freed_by()
            ready = [self._add(f"read state {number}.{chunk}", READ, read, [*after, *freed])]
            if self._grads == "device":
                copy = self._costs.to_host(elements, width) / chunks
                ready.append(self._add(f"gradient {number}.{chunk}", TO_HOST, copy, after))
            done.append(self._add(f"update {number}.{chunk}", HOST, update, ready))
            self._writes.append((f"{STATE} {number}.{chunk}", write, [done[-1]]))
        return done

    def _freed_by(self) -> list[int]:
        """Return the write that frees the next chunk's buffer, if it has to wait for one."""
        waiting = sum(name.startswith(STATE) for name, _, _ in self._writes)
        behind = CHUNKS_IN_BUFFER - waiting
        return [self._written[-behind]] if len(self._written) >= behind else []

    def _write(self) -> None:
        name, seconds, after = self._writes.popleft()
        task = self._add(name, WRITE, seconds, after)
        self._stored.append(task)
        if name.startswith(STATE):
            self._written.append(task)

    def _publish(self, number: int, after: Sequence[int]) -> list[int]:
        """Move updated parameters to their tier, and to all ranks where they are replicated."""
        unit, ready, elements = self._units[number], list(after), self._owned(number)
        if self._optimizer == "device" and self._params != "device":
            seconds = self._costs.to_host(elements, PARAMETER_BYTES)
            ready = [self._add(f"parameters {number}", TO_HOST, seconds, ready)]
        if self._optimizer != "device" and self._params == "device":
            seconds = self._costs.to_device(elements, PARAMETER_BYTES)
            ready = [self._add(f"parameters {number}", TO_DEVICE, seconds, ready)]
        if self._params == "nvme":
            seconds = elements * PARAMETER_BYTES / self._costs.rates.nvme_write
            self._writes.append((f"store parameters {number}", seconds, ready))
        if self._training.world_size > 1 and self._placement.optimizer and not self._placement.params:
            seconds = self._costs.collective(unit.parameters, PARAMETER_BYTES)
            ready = [self._add(f"gather updated {number}", LINK, seconds, ready)]
        return ready

    def _owned(self, number: int) -> int:
        return self._training.owned(self._units[number].parameters, self._placement.optimizer)
