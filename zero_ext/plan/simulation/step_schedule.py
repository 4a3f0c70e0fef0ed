"""A step of one rank as tasks on a timeline, in the order in which the engine starts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zero_ext.config.buffer_sizes import REDUCTIONS_IN_FLIGHT
from zero_ext.config.tiers import is_stored
from zero_ext.plan.simulation.planned_units import config_of, unit_specs
from zero_ext.plan.simulation.task_timeline import (
    COMPUTE,
    HOST,
    LINK,
    READ,
    TO_DEVICE,
    TO_HOST,
    WRITE,
    Costs,
    Timeline,
    merged_resources,
)
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES
from zero_ext.plan.simulation.transformer_cost import UnitCost
from zero_ext.zero.memory.gathered_unit import ExpertSelection, UnitSpec
from zero_ext.zero.unshard.pool_replay import PlannedPasses, PlannedUnit

CHUNKS = 256  # of all updates through NVMe at most; the engine's chunks are smaller, which changes ends only
CHUNKS_IN_BUFFER = 8  # simultaneously, in the staging buffer
READ_AHEAD = 4
STATE = "write state"

Write = tuple[str, float, list[int]]


class OptimizerSchedule:
    """Adds the tasks of updates to a timeline, one unit or all together.

    Writes to NVMe are handed over behind the reads that run ahead of them, as the engine's ring does it.
    """

    def __init__(self, units: Sequence[UnitCost], costs: Costs, timeline: Timeline) -> None:
        self._units, self._costs, self._add = units, costs, timeline.add
        self._training, self._placement = costs.training, costs.placement
        self.gradients_at = {"device": COMPUTE, "host": HOST, "nvme": READ}[costs.training.grads]
        self._writes: deque[Write] = deque()
        self._written: deque[int] = deque(maxlen=CHUNKS_IN_BUFFER)
        self._stored: list[int] = []
        self._done: dict[int, list[int]] = {}

    def norm(self) -> float:
        """Return seconds of the global norm, if one is asked for."""
        if not self._training.clipping:
            return 0.0
        sharded = self._placement.grads or self._placement.optimizer
        return self._costs.norm(sum(self._costs.owned(unit, sharded) for unit in self._units))

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
        if self._costs.matrices.flops:
            after = self._orthogonalize(number, after)
        in_storage, mode = is_stored(self._training.optimizer), self._training.update_mode
        done = self._stream(number, after) if in_storage else self._in_memory(number, after)
        self._done[number] = done
        if mode == "after_backward" or (mode == "in_backward" and self._placement.params):
            return self._publish(number, done)
        return done

    def _orthogonalize(self, number: int, after: Sequence[int]) -> list[int]:
        """Send a unit's matrices to their owners and back. Each unit has its part of what all owners do."""
        share = self._units[number].parameters / sum(unit.parameters for unit in self._units)
        ready, seconds = list(after), self._costs.to_owners(share)
        away, copied = (
            self._training.optimizer != "device",
            self._owned(number) * self._training.direction_bytes,
        )
        if away:
            ready = [self._add(f"directions {number}", TO_DEVICE, self._costs.to_device(copied), ready)]
        if seconds:
            ready = [self._add(f"matrices {number}", LINK, seconds, ready)]
        ready = [self._add(f"orthogonalize {number}", COMPUTE, self._costs.orthogonalize(share), ready)]
        if seconds:
            ready = [self._add(f"results {number}", LINK, seconds, ready)]
        if away:
            ready = [self._add(f"orthogonal {number}", TO_HOST, self._costs.to_host(copied), ready)]
        return ready

    def _in_memory(self, number: int, after: Sequence[int]) -> list[int]:
        elements, ready, training = self._owned(number), list(after), self._training
        nbytes = elements * training.gradient_bytes
        if is_stored(training.grads):
            ready = [self._add(f"read gradient {number}", READ, nbytes / self._costs.rates.nvme_read, ready)]
        if training.optimizer == "host" and training.grads == "device":
            ready = [self._add(f"gradient {number}", TO_HOST, self._costs.to_host(nbytes), ready)]
        if training.optimizer == "device" and training.grads != "device":
            ready = [self._add(f"gradient {number}", TO_DEVICE, self._costs.to_device(nbytes), ready)]
        where = COMPUTE if training.optimizer == "device" else HOST
        return [self._add(f"update {number}", where, self._costs.update(elements), ready)]

    def _stream(self, number: int, after: Sequence[int]) -> list[int]:
        """Read run ahead of updates; a chunk's buffer is free again once it is written."""
        elements, chunks, done = self._owned(number), -(-CHUNKS // len(self._units)), []
        gradient = elements * self._training.gradient_bytes / chunks
        read, write = (seconds / chunks for seconds in self._costs.stored_state(elements))
        update = self._costs.update(elements) / chunks
        if is_stored(self._training.grads):
            read += gradient / self._costs.rates.nvme_read
        for chunk in range(chunks):
            while len(self._writes) > READ_AHEAD:
                self._write()
            ready = [self._add(f"read state {number}.{chunk}", READ, read, [*after, *self._freed_by()])]
            if self._training.grads == "device":
                copy = self._costs.to_host(gradient)
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
        ready, nbytes = list(after), self._owned(number) * PARAMETER_BYTES
        if self._training.optimizer == "device" and self._training.params != "device":
            ready = [self._add(f"parameters {number}", TO_HOST, self._costs.to_host(nbytes), ready)]
        if self._training.optimizer != "device" and self._training.params == "device":
            ready = [self._add(f"parameters {number}", TO_DEVICE, self._costs.to_device(nbytes), ready)]
        if is_stored(self._training.params):
            seconds = nbytes / self._costs.rates.nvme_write
            self._writes.append((f"store parameters {number}", seconds, ready))
        unit = self._units[number]
        if self._costs.ranks(unit) > 1 and self._placement.optimizer and not self._placement.params:
            seconds = self._costs.collective(unit.parameters, PARAMETER_BYTES, unit.spread)
            ready = [self._add(f"gather updated {number}", LINK, seconds, ready)]
        return ready

    def _owned(self, number: int) -> int:
        return self._costs.owned(self._units[number], self._placement.optimizer)


class _SimulatedUnit(PlannedUnit):
    """A unit with fetches and gathers that are tasks of a schedule."""

    def __init__(self, spec: UnitSpec, number: int, schedule: StepSchedule) -> None:
        super().__init__(spec)
        self._number, self._schedule = number, schedule

    @property
    def needs_early_gather(self) -> bool:
        """Return whether other ranks have shards of it, or the device is not the processor."""
        return super().needs_early_gather or not self._schedule.costs.hardware.device_is_host

    def to_fetching(self, exact: bool = False, experts: ExpertSelection = None) -> None:
        """Add the read from NVMe, if there is one."""
        super().to_fetching(exact, experts)
        self._schedule.fetch(self._number)

    def to_gathering(self) -> None:
        """Add the copy to the device and the exchange."""
        super().to_gathering()
        self._schedule.gather(self._number)

    def to_gathered(self) -> None:
        """Let what follows wait for it."""
        super().to_gathered()
        self._schedule.wait_for(self._number)


class StepSchedule:
    """The tasks of a step: micro-batches of forward and backward, and the updates when their time comes.

    The engine's own prefetcher gathers and releases the units. They are reduced as in ``GradientReducer`` and
    updated as in the classes that ``offload.update_mode`` chooses from.
    """

    def __init__(self, units: Sequence[UnitCost], costs: Costs) -> None:
        self.units, self.costs = tuple(units), costs
        self.training, self.placement = costs.training, costs.placement
        self.timeline = Timeline(merged_resources(costs.hardware, self.training))
        self._add = self.timeline.add
        self._updates = OptimizerSchedule(self.units, costs, self.timeline)
        specs = unit_specs(self.units, self.training)
        simulated = [_SimulatedUnit(spec, number, self) for number, spec in enumerate(specs)]
        self._passes = PlannedPasses(simulated, len(specs), config_of(self.training).units)
        self._gathered: dict[int, list[int]] = {}
        self._fetched: dict[int, int] = {}
        self._awaited: list[int] = []  # gathers that have been waited for since something was computed last
        self._outputs: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        # By unit, the task after which its reduced gradient is in its storage.
        self._stored_gradients: dict[int, int] = {}
        self._now: list[int] = []  # what the next computing of forward and backward comes after

    def run(self) -> Timeline:
        """Build the whole step."""
        when, steps = self.training.update_mode, self.training.accumulation_steps
        if when == "delayed":
            self._updates.run_all([])
        for number in range(steps):
            self._forward()
            self._backward(first=number == 0, last=number == steps - 1)
        done = [*self._stored_gradients.values(), *self._now]
        done = [self._add("norm", self._updates.gradients_at, self._updates.norm(), done)]
        if seconds := self.costs.add_lines():
            done = [self._add("rows and columns", LINK, seconds, done)]
        if when == "after_backward":
            self._updates.run_all(done)
        else:
            self._updates.publish_rest(done)
        self._updates.end()
        return self.timeline

    def _forward(self) -> None:
        for number in self._passes.forward():
            unit = self.units[number]
            self._exchange(number, 1)
            self._now = [self._compute("forward", number, self.costs.forward(unit), self._now)]
            self._exchange(number, 1)
            if self.training.activations == "recomputed_host" and unit.recomputes:
                away = self.costs.to_host(self.costs.tokens * unit.output)
                self._outputs[number] = self._add(f"offload output {number}", TO_HOST, away, self._now)

    def _backward(self, first: bool, last: bool) -> None:
        flying: deque[int] = deque()
        for number in self._passes.backward():
            unit, after = self.units[number], self._now
            if number in self._outputs:
                back = self.costs.to_device(self.costs.tokens * unit.output)
                ready = [self._outputs.pop(number), *self._now]
                after = [*self._now, self._add(f"fetch output {number}", TO_DEVICE, back, ready)]
            self._now = after
            self._exchange(number, 3 if self.costs.recomputes(unit) else 1)
            self._now = [self._compute("backward", number, self.costs.backward(unit), self._now)]
            computed = self._now
            self._exchange(number, 1)
            if self.placement.grads or last:
                if len(flying) == REDUCTIONS_IN_FLIGHT:
                    self._finish_oldest(flying, last)
                self._reduce(number, computed[0], first)
                flying.append(number)
                if self.costs.ranks(unit) == 1:
                    self._finish_oldest(flying, last)
            elif not first:
                self._add_up(number)
        while flying:
            self._finish_oldest(flying, last)

    def _exchange(self, number: int, times: int) -> None:
        """Send tokens to experts on other ranks, or their results back, and wait for those of other ranks."""
        if seconds := self.costs.exchange(self.units[number]):
            self._now = [self._add(f"exchange {number}", LINK, times * seconds, self._now)]

    def _finish_oldest(self, flying: deque[int], last: bool) -> None:
        """Backward waits for the reduction; an update in backward runs in its thread."""
        number = flying.popleft()
        self._now = [*self._now, self._reduced[number]]
        if last and self.training.update_mode == "in_backward":
            self._now = [*self._now, *self._updates.run(number, [*self._now, self._stored_gradients[number]])]

    def _compute(self, what: str, number: int, seconds: float, after: Sequence[int]) -> int:
        awaited, self._awaited = self._awaited, []
        return self._add(f"{what} {number}", COMPUTE, seconds, [*after, *awaited])

    def fetch(self, number: int) -> None:
        """Read the shard of a unit, if it is on NVMe."""
        if is_stored(self.training.params):
            shard = self.costs.owned(self.units[number], True)
            seconds = shard * PARAMETER_BYTES / self.costs.rates.nvme_read
            self._fetched[number] = self._add(f"fetch {number}", READ, seconds, [*self._now, *self._awaited])

    def gather(self, number: int) -> None:
        """Bring the shards of a unit to the device, on every rank."""
        unit, tier = self.units[number], self.training.params
        ready = [*self._now, *self._awaited]
        if number in self._fetched:
            ready.append(self._fetched.pop(number))
        straight = is_stored(tier) and self.costs.hardware.device_is_host
        if tier != "device" and not straight:
            shard = self.costs.owned(unit, True)
            seconds = self.costs.to_device(shard * PARAMETER_BYTES)
            ready = [self._add(f"shard {number}", TO_DEVICE, seconds, ready)]
        if self.costs.ranks(unit) > 1:
            seconds = self.costs.collective(unit.parameters, PARAMETER_BYTES, unit.spread)
            ready = [self._add(f"gather {number}", LINK, seconds, ready)]
        self._gathered[number] = ready

    def wait_for(self, number: int) -> None:
        """Let what follows wait for the gather of a unit."""
        self._awaited += self._gathered[number]

    def _add_up(self, number: int) -> None:
        """Add a gradient that stays local to that of earlier micro-batches."""
        seconds = self.costs.accumulate(self.units[number].parameters, self.costs.rates.device)
        self._now = [*self._now, self._add(f"accumulate {number}", COMPUTE, seconds, self._now)]

    def _reduce(self, number: int, task: int, first: bool) -> None:
        """Reduction over the ranks behind ``task``, then to the gradient's storage."""
        unit = self.units[number]
        if self.costs.ranks(unit) > 1:
            width = PARAMETER_BYTES if self.placement.grads else self.training.gradient_bytes
            seconds = self.costs.reduce(unit.parameters, width, unit.spread)
            task = self._add(f"reduce {number}", LINK, seconds, [task])
            if not self.placement.optimizer:
                seconds = self.costs.collective(unit.parameters, width, unit.spread)
                task = self._add(f"gather gradient {number}", LINK, seconds, [task])
        self._reduced[number] = task
        self._stored_gradients[number] = self._store_gradient(number, task, first)

    def _store_gradient(self, number: int, task: int, first: bool) -> int:
        if not self.placement.grads:
            return task
        tier, rates = self.training.grads, self.costs.rates
        shard = self.costs.owned(self.units[number], True)
        if tier != "device":
            seconds = self.costs.to_host(shard * PARAMETER_BYTES)
            task = self._add(f"gradient {number}", TO_HOST, seconds, [task])
        nbytes = shard * self.training.gradient_bytes
        if not first:
            if is_stored(tier):
                task = self._add(f"sum so far {number}", READ, nbytes / rates.nvme_read, [task])
            where, rate = (COMPUTE, rates.device) if tier == "device" else (HOST, rates.host)
            task = self._add(f"add {number}", where, self.costs.accumulate(shard, rate), [task])
        if is_stored(tier):
            task = self._add(f"store gradient {number}", WRITE, nbytes / rates.nvme_write, [task])
        return task
