"""Forward and backward of one rank as tasks on a timeline, in the order in which the engine starts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zero_ext.config.overlap_limits import REDUCTIONS_IN_FLIGHT
from zero_ext.plan.simulation.costs import Costs
from zero_ext.plan.simulation.optimizer_schedule import OptimizerSchedule
from zero_ext.plan.simulation.resources import COMPUTE, HOST, LINK, READ, TO_DEVICE, TO_HOST, WRITE, Resources
from zero_ext.plan.simulation.simulated_staging import numbers_gathered_once
from zero_ext.plan.simulation.task_timeline import Timeline
from zero_ext.plan.simulation.training_setup import PARAMETER_BYTES
from zero_ext.plan.simulation.transformer_cost import UnitCost
from zero_ext.zero.memory.lookahead import look_ahead


class StepSchedule:
    """The tasks of a step: micro-batches of forward and backward, and the updates when their time comes.

    Units are gathered ahead as in ``Prefetcher``, reduced as in ``GradientReducer``, updated as in the
    classes that ``offload.update_mode`` chooses from.
    """

    def __init__(self, units: Sequence[UnitCost], costs: Costs) -> None:
        self.units = tuple(units)
        self.costs = costs
        self.training = costs.training
        self.placement = costs.placement
        self.timeline = Timeline()
        self._add = Resources(self.timeline, costs.hardware, self.training).add
        self._updates = OptimizerSchedule(self.units, costs, self._add)
        self._once = numbers_gathered_once(self.units, self.training)
        self._gathered: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        # By unit, the task after which its reduced gradient is in its storage.
        self._stored_gradients: dict[int, int] = {}
        self._now: list[int] = []  # what the next computing of forward and backward comes after

    def run(self) -> Timeline:
        """Builds the whole step."""
        when, steps = self.training.update_mode, self.training.accumulation_steps
        if when == "delayed":
            self._updates.run_all([])
        for number in range(steps):
            self._forward()
            self._backward(first=number == 0, last=number == steps - 1)
        done = [*self._stored_gradients.values(), *self._now]
        done = [self._add("norm", self._updates.gradients_at, self._updates.norm(), done)]
        if when == "after_backward":
            self._updates.run_all(done)
        else:
            self._updates.publish_rest(done)
        self._updates.end()
        return self.timeline

    def _forward(self) -> None:
        order = range(len(self.units))
        for position, number in enumerate(order):
            unit, before = self.units[number], self._now
            self._now = [self._compute("forward", number, self.costs.forward(unit), before)]
            if self.training.activations == "recomputed_host" and unit.recomputes:
                away, _ = self.costs.output(unit)
                self._outputs[number] = self._add(f"offload output {number}", TO_HOST, away, self._now)
            self._look_ahead(order, position, before)
        self._release(remaining=self._once)

    def _backward(self, first: bool, last: bool) -> None:
        order = range(len(self.units))[::-1]
        flying: deque[int] = deque()
        for position, number in enumerate(order):
            unit, before = self.units[number], self._now
            after = before
            if number in self._outputs:
                _, back = self.costs.output(unit)
                ready = [self._outputs.pop(number), *before]
                after = [*before, self._add(f"fetch output {number}", TO_DEVICE, back, ready)]
            self._now = [self._compute("backward", number, self.costs.backward(unit), after)]
            self._look_ahead(order, position, before)
            if self.placement.grads or last:
                if len(flying) == REDUCTIONS_IN_FLIGHT:
                    self._finish_oldest(flying, last)
                self._reduce(number, first)
                flying.append(number)
                if self.training.world_size == 1:
                    self._finish_oldest(flying, last)
            elif not first:
                self._add_up(number)
        while flying:
            self._finish_oldest(flying, last)
        self._release()

    def _finish_oldest(self, flying: deque[int], last: bool) -> None:
        """Backward waits for the reduction; an update in backward runs in its thread."""
        number = flying.popleft()
        self._now = [*self._now, self._reduced[number]]
        if last and self.training.update_mode == "in_backward":
            self._now = [*self._now, *self._updates.run(number, [*self._now, self._stored_gradients[number]])]

    def _compute(self, what: str, number: int, seconds: float, after: Sequence[int]) -> int:
        if self.placement.params and number not in self._gathered:
            self._fetch(number, after)
            self._gather(number, after)
        present = [self._gathered[number]] if number in self._gathered else []
        return self._add(f"{what} {number}", COMPUTE, seconds, [*after, *present])

    def _look_ahead(self, order: Sequence[int], position: int, before: Sequence[int]) -> None:
        """What the need of the unit at ``position`` starts, once that is present."""
        if not self.placement.params:
            return
        after = [*before, self._gathered[order[position]]]
        stored = self.placement.params_tier == "nvme"
        ahead = look_ahead(
            order[position + 1 :],
            lambda number: self.units[number].parameters,
            lambda _: stored,
            self.training.prefetch_elements,
        )
        for count, number in enumerate(ahead):
            if number not in self._gathered:
                self._fetch(number, after)
                if not stored or count == 0:
                    self._gather(number, after)

    def _fetch(self, number: int, after: Sequence[int]) -> None:
        if self.placement.params_tier == "nvme" and number not in self._fetched:
            seconds = self.costs.fetch(self.units[number])
            self._fetched[number] = self._add(f"fetch {number}", READ, seconds, after)

    def _gather(self, number: int, after: Sequence[int]) -> None:
        unit, tier = self.units[number], self.placement.params_tier
        ready = [*after, self._fetched[number]] if number in self._fetched else list(after)
        straight = tier == "nvme" and self.costs.hardware.device_is_host
        if tier != "device" and not straight:
            shard = self.training.owned(unit.parameters, True)
            seconds = self.costs.to_device(shard, PARAMETER_BYTES)
            ready = [self._add(f"shard {number}", TO_DEVICE, seconds, ready)]
        if self.training.world_size > 1:
            seconds = self.costs.collective(unit.parameters, PARAMETER_BYTES)
            ready = [self._add(f"gather {number}", LINK, seconds, ready)]
        self._gathered[number] = ready[-1]  # the exchange, else what brings the shard

    def _release(self, remaining: frozenset[int] = frozenset()) -> None:
        """All units but those ``remaining`` go: backward finds them there, or does not read them."""
        self._gathered = {number: task for number, task in self._gathered.items() if number in remaining}
        self._fetched.clear()

    def _add_up(self, number: int) -> None:
        """A gradient that stays local goes into what earlier micro-batches left."""
        seconds = self.costs.accumulate(self.units[number].parameters, self.costs.rates.device)
        self._now = [*self._now, self._add(f"accumulate {number}", COMPUTE, seconds, self._now)]

    def _reduce(self, number: int, first: bool) -> None:
        """Reduction over the ranks, then to the gradient's storage."""
        task = self._now[0]
        if self.training.world_size > 1:
            width = PARAMETER_BYTES if self.placement.grads else self.training.gradient_bytes
            elements = self.units[number].parameters
            task = self._add(f"reduce {number}", LINK, self.costs.reduce(elements, width), [task])
            if not self.placement.optimizer:
                seconds = self.costs.collective(elements, width)
                task = self._add(f"gather gradient {number}", LINK, seconds, [task])
        self._reduced[number] = task
        self._stored_gradients[number] = self._store_gradient(number, task, first)

    def _store_gradient(self, number: int, task: int, first: bool) -> int:
        if not self.placement.grads:
            return task
        tier, rates = self.placement.grads_tier, self.costs.rates
        shard = self.training.owned(self.units[number].parameters, True)
        if tier != "device":
            seconds = self.costs.to_host(shard, PARAMETER_BYTES)
            task = self._add(f"gradient {number}", TO_HOST, seconds, [task])
        nbytes = shard * self.training.gradient_bytes
        if not first:
            if tier == "nvme":
                task = self._add(f"sum so far {number}", READ, nbytes / rates.nvme_read, [task])
            where, rate = (COMPUTE, rates.device) if tier == "device" else (HOST, rates.host)
            task = self._add(f"add {number}", where, self.costs.accumulate(shard, rate), [task])
        if tier == "nvme":
            task = self._add(f"store gradient {number}", WRITE, nbytes / rates.nvme_write, [task])
        return task
