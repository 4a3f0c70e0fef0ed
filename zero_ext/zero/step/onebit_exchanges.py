"""The 1-bit exchanges: steps with a frozen variance in which the ranks send signs instead of gradients."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.comm.onebit_all_reduce import OneBitAllReduce
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.optim.one_bit_steppers import (
    OneBitLambStepper,
    OneBitStepper,
    decay_,
    denominator,
    square_average,
)
from zero_ext.zero.step.update_schedule import AuxiliaryState, Ownership, UpdateInputs
from zero_ext.zero.units.flat_layout import FlatLayout
from zero_ext.zero.units.unit import Unit

PREFIX = "one_bit_"
OWN, SHARD, SHARED = Ownership


class ExchangeStrategy(ABC):
    """A step with a frozen variance. ``OWNERSHIP`` names the auxiliary state, which starts at zero."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]]
    SINGLE_RANK = False  # whether a single rank uses it, too

    def __init__(self, inputs: UpdateInputs, stepper: OneBitStepper) -> None:
        self._masters, self._gradients, self._collectives = inputs[1:4]
        self._stepper = stepper
        self._ranks = self._collectives.world_size

        def zeros(unit: Unit, ownership: Ownership) -> torch.Tensor:
            numel = unit.layout.shard_numel if ownership is SHARD else unit.layout.numel
            return torch.zeros(numel, dtype=torch.float32, device=unit.flat.device)

        self._state = {
            kind: [zeros(master.unit, ownership) for master in self._masters]
            for kind, ownership in self.OWNERSHIP.items()
        }

    @abstractmethod
    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        """Step ``used`` parameters with local gradients times ``scale``; a collective if it ``exchanges``."""

    def restore(self) -> None:
        """Update the parameters after the auxiliary state was loaded."""
        for master in self._masters:
            master.write_params()

    @classmethod
    def names(cls, collectives: Collectives) -> dict[str, str]:
        """Return the kinds' names in a checkpoint. Names of state of one rank contain rank and world size."""
        rank, ranks = collectives.rank, collectives.world_size
        suffix = {OWN: f"_{rank}_of_{ranks}", SHARD: f"_of_{ranks}", SHARED: ""}
        return {kind: f"{PREFIX}{kind}{suffix[ownership]}" for kind, ownership in cls.OWNERSHIP.items()}

    def auxiliary_state(self) -> Iterator[AuxiliaryState]:
        """Yield the state of this rank that an exact resume needs."""
        for kind, name in self.names(self._collectives).items():
            ownership = self.OWNERSHIP[kind]
            for number, values in enumerate(self._state[kind]):
                begin = self._shard_begin(number) if ownership is SHARD else 0
                yield AuxiliaryState(name, number, begin, values, ownership)

    def allocated_bytes(self) -> int:
        """Return the bytes on the device."""
        return sum(values.nbytes for each in self._state.values() for values in each)

    def _updating(self) -> list[int]:
        """Return the numbers of the masters of units with gradients on any rank."""
        return [number for number, each in enumerate(self._gradients) if each.contributed]

    def _layout(self, number: int) -> FlatLayout:
        return self._masters[number].unit.layout

    def _shard_begin(self, number: int) -> int:
        return self._layout(number).shard_range(self._collectives.rank)[0]

    def _exchange(self, number: int, what: str) -> OneBitAllReduce:
        unit = self._masters[number].unit
        name = f"{what} of {unit.describe()}"
        return OneBitAllReduce(self._collectives, unit.layout.numel, unit.flat.device, name)

    def _idle(self, number: int, used: frozenset[str]) -> list[tuple[int, int]]:
        """Return the elements that are left out: padding, and parameters that are not in ``used``."""
        layout = self._layout(number)
        specs = zip(layout.specs, layout.offsets, strict=True)
        unused = [(begin, begin + spec.numel) for spec, begin in specs if spec.name not in used]
        return [*layout.gaps, *unused]


@contextlib.contextmanager
def temporarily_zeroed(
    values: torch.Tensor, idle: Sequence[tuple[int, int]], begin: int = 0
) -> Iterator[None]:
    """Return a context that sets the ``idle`` elements of ``values`` to zero and restores them at its end.
    ``values`` [n] are the elements from ``begin`` on of the buffer that ``idle`` refers to."""
    end = begin + values.numel()
    slices = [
        values[max(first, begin) - begin : min(last, end) - begin]
        for first, last in idle
        if first < end and last > begin
    ]
    saved = [each.clone() for each in slices]
    for each in slices:
        each.zero_()
    try:
        yield
    finally:
        for each, before in zip(slices, saved, strict=True):
            each.copy_(before)


class ReplicatedExchange(ExchangeStrategy):
    """Averages one value per element over the ranks with sign compression (Tang et al., arXiv 2102.02888,
    section 5). The two kinds of its state that end in "error" are the worker's and the server's compression
    error, in this order."""

    IN_MOMENTUM = False  # whether the average is written to the memory of the momentum

    def _average(
        self,
        used: frozenset[str],
        what: str,
        numbers: Sequence[int],
        values: Callable[[int], torch.Tensor],
        factor: float,
    ) -> None:
        """Pass the average of ``factor`` x ``values(number)`` [numel] of each of ``numbers`` to
        :meth:`_averaged`. Elements of parameters not in ``used`` and their errors are left out."""
        own, server = (self._state[kind] for kind in self.OWNERSHIP if kind.endswith("error"))
        exchanges = {number: self._exchange(number, what) for number in numbers}
        idle = {number: self._idle(number, used) for number in numbers}
        # One loop over all units per phase, so that a payload is on its way while other units are computed.
        for number, exchange in exchanges.items():
            sent = values(number)
            with temporarily_zeroed(sent, idle[number]), temporarily_zeroed(own[number], idle[number]):
                exchange.scatter(sent, own[number], factor)
        for number, exchange in exchanges.items():
            received = exchange.scattered()
            with temporarily_zeroed(server[number], idle[number], self._shard_begin(number)):
                ops.reduce_1bit_(exchange.own, server[number], received, 1 / self._ranks)
            exchange.gather()
        for number, exchange in exchanges.items():
            messages, flat = exchange.gathered(), self._masters[number].unit.flat
            momentum = self._stepper.state(number, "exp_avg") if self.IN_MOMENTUM else None
            average = torch.empty_like(flat, dtype=torch.float32) if momentum is None else momentum
            with temporarily_zeroed(average, idle[number]):
                ops.decompress_1bit_(average, messages, 1.0, False, self._ranks)
            self._averaged(number, average, used)
            # Otherwise it would live until the buffer of the next unit has been allocated.
            del average, momentum

    @abstractmethod
    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        """Update a unit with ``average``, float32 [numel], where elements left out are unchanged."""

    def _descend(self, number: int, used: frozenset[str]) -> None:
        master = self._masters[number]
        self._stepper.descend(number, self._stepper.hyper_ranges(number, used))
        master.write_params()


class MomentumExchange(ReplicatedExchange):
    """1-bit Adam: each rank averages its own gradients into the momentum, then the ranks average that."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {"momentum_error": OWN, "momentum_server_error": SHARD}
    IN_MOMENTUM = True

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:

        def local_average(number: int) -> torch.Tensor:
            momentum = self._stepper.state(number, "exp_avg")
            local = self._gradients[number].local_sum()
            self._stepper.average(momentum, local, scale, self._stepper.hyper_ranges(number, used))
            return momentum

        self._average(used, "the momentum", self._updating(), local_average, 1.0)

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        self._descend(number, used)


class GradientExchange(ReplicatedExchange):
    """0/1 Adam between two updates of the variance: the ranks average gradients."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {"gradient_error": OWN, "gradient_server_error": SHARD}

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        self._average(
            used, "the gradients", self._updating(), lambda number: self._gradients[number].local_sum(), scale
        )

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        runs = self._stepper.hyper_ranges(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), average, 1.0, runs)
        self._descend(number, used)


_CHUNK_ELEMENTS = 1 << 20


class ShardedExchange(ExchangeStrategy):
    """Each rank sends the signs of its gradients to the owners of the shards. The owners average them, update
    their masters, and send the signs of how far these are ahead of the parameters, which all ranks add.

    The parameters so follow the masters a step of one size a block at a time. What they still lack is in the
    next difference, so this direction needs no error of its own, but every rank keeps the parameters in
    float32 (``replica``): in low precision most of these steps would be lost to rounding.
    """

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {"gradient_error": OWN, "replica": SHARED}

    def __init__(self, inputs: UpdateInputs, stepper: OneBitStepper) -> None:
        super().__init__(inputs, stepper)
        self._follow_parameters()

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        self._follow_parameters()
        exchanges_of = {number: self._exchange(number, "the gradients") for number in self._updating()}
        idle = {number: self._idle(number, used) for number in exchanges_of}
        errors, replica = self._state["gradient_error"], self._state["replica"]
        for number, exchange in exchanges_of.items():
            with temporarily_zeroed(errors[number], idle[number]):
                exchange.scatter(self._gradients[number].local_sum(), errors[number], scale)
        for number, exchange in exchanges_of.items():
            self._step_shard(number, exchange, used)
            exchange.gather()
        for number, exchange in exchanges_of.items():
            messages = exchange.gathered()
            with temporarily_zeroed(replica[number], idle[number]):
                ops.decompress_1bit_(replica[number], messages, 1.0, True, self._ranks)
            self._masters[number].unit.flat.copy_(replica[number])

    def _step_shard(self, number: int, exchange: OneBitAllReduce, used: frozenset[str]) -> None:
        """Step this rank's masters; ``exchange.own`` says how far they are ahead then."""
        begin, end = self._layout(number).shard_range(self._collectives.rank)
        received = exchange.scattered()
        scratch = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        ops.sum_1bit_(scratch, received, 1 / self._ranks, False)
        runs = self._stepper.hyper_ranges(number, used)
        self._stepper.average(self._stepper.state(number, "exp_avg"), scratch, 1.0, runs)
        self._stepper.descend(number, runs)
        ahead = torch.sub(
            self._stepper.state(number, "master"), self._state["replica"][number][begin:end], out=scratch
        )
        with temporarily_zeroed(ahead, self._idle(number, used), begin):
            # The errors of this direction are discarded. What the signs lose is part of the next difference.
            ops.compress_1bit_(exchange.own, torch.zeros_like(ahead), ahead, 1.0, 1)

    def restore(self) -> None:
        for master, replica in zip(self._masters, self._state["replica"], strict=True):
            master.unit.flat.copy_(replica)

    def _follow_parameters(self) -> None:
        """Take over parameters that something else has written since the last step: a step in full
        precision, the user, a checkpoint."""
        for master, replica in zip(self._masters, self._state["replica"], strict=True):
            for stored, live in zip(
                replica.split(_CHUNK_ELEMENTS), master.unit.flat.split(_CHUNK_ELEMENTS), strict=True
            ):
                # Equal after rounding means that nobody wrote, and the float32 value keeps its low bits.
                torch.where(stored.to(live.dtype) == live, stored, live.float(), out=stored)


class ZeroOneExchange(ReplicatedExchange):
    """Each rank steps by a momentum of its own. ``drift`` is the sum of learning rate x momentum since the
    ranks last met; their parameters are the masters, which stay the same on all ranks, less drift over the
    root of the variance. When they meet, the average of the drifts, by its signs, moves the masters, and
    divided by the sum of the learning rates it is everybody's momentum.

    Weight decay acts on the masters. Source: Lu et al., "0/1 Adam" (arXiv 2202.06009), algorithm 1.
    """

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "drift": OWN,
        "drift_error": OWN,
        "drift_server_error": SHARD,
        "momentum": OWN,
    }

    def __init__(self, inputs: UpdateInputs, stepper: OneBitStepper) -> None:
        super().__init__(inputs, stepper)
        for number, momentum in enumerate(self._state["momentum"]):
            momentum.copy_(self._stepper.state(number, "exp_avg"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        self._stepper.add_rates(used)
        for number in self._updating():
            momentum, drift = self._state["momentum"][number], self._state["drift"][number]
            local = self._gradients[number].local_sum()
            runs = self._stepper.hyper_ranges(number, used)
            self._stepper.average(momentum, local, scale, runs)
            master = self._stepper.state(number, "master")
            for run in runs:
                for chunk in run.chunks():
                    drift[chunk].add_(momentum[chunk] * run.lr)
                    decay_(master[chunk], run)
                    self._stepper.check_finite(master[chunk])
            if not exchanges:
                self._write(number)
        if exchanges:
            # Not ``used``: parameters without a gradient in this step may have drifted in earlier ones.
            drifted = frozenset(self._stepper.rates)
            self._average(drifted, "the drift", self._drifted(drifted), self._state["drift"].__getitem__, 1.0)
            self._stepper.rates.clear()

    def _drifted(self, names: frozenset[str]) -> list[int]:
        return [
            number
            for number, master in enumerate(self._masters)
            if not names.isdisjoint(spec.name for spec in master.unit.layout.specs)
        ]

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        master, common = (self._stepper.state(number, kind) for kind in ("master", "exp_avg"))
        variance = self._stepper.state(number, "exp_avg_sq")
        for run in self._stepper.hyper_ranges(number, used):
            for chunk in run.chunks():
                update = average[chunk] / denominator(variance[chunk], run.eps)
                self._stepper.check_finite(master[chunk].sub_(update))
                common[chunk].copy_(average[chunk] / run.rate)
            own_range = slice(run.begin, run.end)
            self._state["momentum"][number][own_range].copy_(common[own_range])
        self._state["drift"][number].zero_()
        self._masters[number].write_params()

    def restore(self) -> None:
        for number in range(len(self._masters)):
            self._write(number)

    def _write(self, number: int) -> None:
        master, flat = self._stepper.state(number, "master"), self._masters[number].unit.flat
        drift, variance = self._state["drift"][number], self._stepper.state(number, "exp_avg_sq")
        flat.copy_(master)
        for run in self._stepper.hyper_ranges(number, frozenset(self._stepper.rates)):
            for chunk in run.chunks():
                apart = drift[chunk] / denominator(variance[chunk], run.eps)
                flat[chunk].copy_(master[chunk] - apart)


class LambExchange(ReplicatedExchange):
    """Li et al., "1-bit LAMB" (arXiv 2104.06069), algorithm 1. ``fresh_variance`` is computed from the
    gradients that the momenta before and after an exchange imply. A single rank exchanges nothing."""

    OWNERSHIP: ClassVar[Mapping[str, Ownership]] = {
        "lamb_error": OWN,
        "lamb_server_error": SHARD,
        "fresh_variance": SHARED,
    }
    SINGLE_RANK = True
    IN_MOMENTUM = True

    def __init__(self, inputs: UpdateInputs, stepper: OneBitStepper) -> None:
        super().__init__(inputs, stepper)
        if not isinstance(stepper, OneBitLambStepper):
            raise zero_ext_bug("1-bit LAMB's exchange with another optimizer")
        self._lamb = stepper
        self._before: dict[int, torch.Tensor] = {}
        for number, fresh in enumerate(self._state["fresh_variance"]):
            fresh.copy_(self._lamb.state(number, "exp_avg_sq"))

    def step(self, scale: float, used: frozenset[str], exchanges: bool) -> None:
        self._lamb.make_scalings()

        def local_average(number: int) -> torch.Tensor:
            momentum = self._lamb.state(number, "exp_avg")
            self._before[number] = momentum.clone()
            gradient = self._gradient(number)
            for name, run in self._lamb.each(number, used):
                self._lamb.average(momentum, gradient, scale, [run])
                momentum[run.begin : run.end].mul_(self._lamb.scalings[name])
            return momentum

        self._average(used, "the momentum", self._updating(), local_average, 1.0)

    def _gradient(self, number: int) -> torch.Tensor:
        gradients = self._gradients[number]
        if self._ranks > 1:
            return gradients.local_sum()
        alone = gradients.for_optimizer()
        return alone.read(0, alone.numel)

    def _average(
        self,
        used: frozenset[str],
        what: str,
        numbers: Sequence[int],
        values: Callable[[int], torch.Tensor],
        factor: float,
    ) -> None:
        if self._ranks > 1:
            super()._average(used, what, numbers, values, factor)
            return
        for number in numbers:
            self._averaged(number, values(number), used)

    def _averaged(self, number: int, average: torch.Tensor, used: frozenset[str]) -> None:
        before, fresh = self._before.pop(number), self._state["fresh_variance"][number]
        for name, run in self._lamb.each(number, used):
            extent = slice(run.begin, run.end)
            momentum = average[extent].div_(self._lamb.scalings[name])
            implied = (momentum - before[extent].mul_(run.beta1)).div_(1 - run.beta1)
            square_average(fresh[extent], implied, 1.0, run._replace(begin=0, end=implied.numel()))
            directions = self._lamb.direction(number, run)
            ratio = self._lamb.adapted_ratio(number, name, run, fresh[extent], directions)
            self._lamb.descend_along(number, run, directions[0], ratio)
        self._masters[number].write_params()
