"""The one-bit family on all ranks in one process, written out from the papers and DeepSpeed's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext import ops
from zero_ext.zero.units.flat_layout import FlatLayout

LossOf = Callable[[nn.Module, int, int, int], torch.Tensor]  # model, step, micro-batch, rank
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-3, 0.01


class Course(NamedTuple):
    """What is trained how; ``policy`` are the arguments of the optimizer that say when what is exchanged."""

    kind: str
    stage: int
    dtype: str
    micro_batches: int
    policy: dict[str, int]
    steps: int = 12


def exchanges(course: Course) -> Iterator[str]:
    """What every step exchanges: DeepSpeed's counters for 0/1 Adam, run through."""
    if course.kind != "ZeroOneAdam":
        then = "scaled" if course.kind == "OneBitLamb" else "gradient" if course.stage else "momentum"
        for step in range(1, course.steps + 1):
            yield "full" if step <= course.policy["freeze_step"] else then
        return
    var_interval, var_counter, local_interval, local_counter = 1, 0, 1, 0
    for step in range(1, course.steps + 1):
        if step <= course.policy["var_freeze_step"]:
            full = step % var_interval == 0
            yield "full" if full else "gradient"
            var_counter += full
            if var_counter == course.policy["var_update_scaler"]:
                var_counter, var_interval = 0, var_interval * 2
            continue
        if course.stage:
            yield "gradient"
        else:
            yield "local" if step % local_interval else "drift"
        local_counter += 1
        if local_counter == course.policy["local_step_scaler"]:
            local_counter = 0
            local_interval = min(course.policy["local_step_clipper"], local_interval * 2)


class Simulated:
    """One flat buffer and its optimizer on all ``ranks``. ``parameters`` are each rank's, in compute
    precision."""

    def __init__(self, layout: FlatLayout, first: torch.Tensor, ranks: int, course: Course) -> None:
        self.layout, self.ranks, self.course = layout, ranks, course
        n = layout.numel

        def zeros() -> torch.Tensor:
            return torch.zeros(n)

        self.master, self.momentum, self.variance = first.float().clone(), zeros(), zeros()
        self.parameters = [first.to(layout.dtype) for _ in range(ranks)]
        self.replica = zeros()
        self.drift, self.rate = [zeros() for _ in range(ranks)], zeros()
        self.own_momentum: list[torch.Tensor] = []
        self.is_raised = False
        self.begin_errors("")

    def begin_errors(self, of: str) -> None:
        self.errors_of = of
        self.worker = [torch.zeros(self.layout.numel) for _ in range(self.ranks)]
        self.server = torch.zeros(self.layout.numel)

    def step(self, what: str, gradients: Sequence[torch.Tensor], used: set[str]) -> None:
        """``gradients`` of all ranks [n], zero where a rank has none."""
        self.included = self._mask(used)
        if what == "full":
            total = torch.zeros(self.layout.numel)
            for gradient in gradients:
                total = total + gradient.float()
            self._adam((total * (1 / self.ranks)).to(gradients[0].dtype).float())
            self.is_raised = False
            return
        if not self.is_raised:
            self.is_raised = True
            self._raise_variance()
        of = "drift" if what in ("local", "drift") else what
        if self.errors_of != of:
            self.begin_errors(of)
            self.replica = self.parameters[0].float()
            self.own_momentum = [self.momentum.clone() for _ in range(self.ranks)]
        exchange = {
            "momentum": self._momentum,
            "scaled": self._scaled,
            "local": self._local,
            "drift": self._meet,
            "gradient": self._sharded if self.course.stage else self._gradient,
        }[what]
        exchange([gradient.float() for gradient in gradients])

    def _scaled(self, gradients: list[torch.Tensor]) -> None:
        raise AssertionError("this is 1-bit LAMB's")

    def _momentum(self, gradients: list[torch.Tensor]) -> None:
        sent = [self._where(self._averaged(self.momentum, each), self.momentum) for each in gradients]
        self._set_momentum(self._all_reduce(sent, self.included))
        self._descend()

    def _gradient(self, gradients: list[torch.Tensor]) -> None:
        self._set_momentum(self._averaged(self.momentum, self._all_reduce(gradients, self.included)))
        self._descend()

    def _sharded(self, gradients: list[torch.Tensor]) -> None:
        live = self.parameters[0]
        self.replica = torch.where(self.replica.to(live.dtype) == live, self.replica, live.float())
        messages = self._to_owners(gradients, self.included)
        average = torch.cat([self._sum(message) for message in messages])
        self._set_momentum(self._averaged(self.momentum, average))
        self._descend()
        ahead = torch.where(self.included, self.master - self.replica, 0.0)
        came = torch.empty_like(ahead)
        ops.decompress_1bit_(
            came, _compressed(ahead, torch.zeros_like(ahead), self.ranks), 1.0, False, self.ranks
        )
        self.replica = self._where(self.replica + came, self.replica)
        self.parameters = [self.replica.to(live.dtype)] * self.ranks

    def _local(self, gradients: list[torch.Tensor]) -> None:
        for rank, gradient in enumerate(gradients):
            momentum = self._where(self._averaged(self.own_momentum[rank], gradient), self.own_momentum[rank])
            self.own_momentum[rank] = momentum
            self.drift[rank] = self._where(self.drift[rank] + momentum * LR, self.drift[rank])
        self.rate = self._where(self.rate.double() + LR, self.rate.double())
        self.master = self._where(self.master * (1 - LR * DECAY), self.master)
        apart = [self.master - drift / (self.variance.sqrt() + EPS) for drift in self.drift]
        self.parameters = [each.to(self.layout.dtype) for each in apart]

    def _meet(self, gradients: list[torch.Tensor]) -> None:
        self._local(gradients)
        drifted = self.rate > 0
        average = self._all_reduce(self.drift, drifted)
        self.master = torch.where(drifted, self.master - average / (self.variance.sqrt() + EPS), self.master)
        self.momentum = torch.where(drifted, average / self.rate.float(), self.momentum)
        self.own_momentum = [torch.where(drifted, self.momentum, each) for each in self.own_momentum]
        self.drift = [torch.zeros_like(each) for each in self.drift]
        self.rate = torch.zeros_like(self.rate)
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _raise_variance(self) -> None:
        self.variance = self.variance.clone()
        for block in self._floors():
            squares = math.fsum((self.momentum[block].double() ** 2).tolist())
            self.variance[block].clamp_(min=(0.5 * math.sqrt(squares)) ** 2 / (block.stop - block.start))

    def _floors(self) -> list[slice]:
        """The blocks of one scale: of every rank's part, 8,192 elements at a time."""
        shard = self.layout.shard_numel
        return [
            slice(start, min(start + 8192, begin + shard))
            for begin in range(0, self.layout.numel, shard)
            for start in range(begin, begin + shard, 8192)
        ]

    # -- exchanges ----------------------------------------------------------------------------------------

    def _to_owners(self, values: Sequence[torch.Tensor], included: torch.Tensor) -> list[torch.Tensor]:
        """By owner, the messages of all ranks."""
        sent = []
        for value, errors in zip(values, self.worker, strict=True):
            before = errors.clone()
            errors.mul_(included)
            sent.append(_compressed(value * included, errors, self.ranks).chunk(self.ranks))
            errors.copy_(torch.where(included, errors, before))
        return [torch.cat([blocks[owner] for blocks in sent]) for owner in range(self.ranks)]

    def _all_reduce(self, values: Sequence[torch.Tensor], included: torch.Tensor) -> torch.Tensor:
        before = self.server.clone()
        self.server.mul_(included)
        messages = []
        for received, error in zip(
            self._to_owners(values, included), self.server.chunk(self.ranks), strict=True
        ):
            message = torch.empty(ops.sign_payload_bytes(error.numel()), dtype=torch.uint8)
            ops.reduce_1bit_(message, error, received, 1 / self.ranks)
            messages.append(message)
        self.server = torch.where(included, self.server, before)
        average = torch.empty(self.layout.numel)
        ops.decompress_1bit_(average, torch.cat(messages), 1.0, False, self.ranks)
        return average

    def _sum(self, messages: torch.Tensor) -> torch.Tensor:
        average = torch.empty(self.layout.shard_numel)
        ops.sum_1bit_(average, messages, 1 / self.ranks, False)
        return average

    # -- arithmetic ---------------------------------------------------------------------------------------

    def _adam(self, gradient: torch.Tensor) -> None:
        before = [each.clone() for each in (self.master, self.momentum, self.variance)]
        live = self.parameters[0].clone()
        row = [LR, BETA1, BETA2, EPS, DECAY, 1e300, 1.0, 0.0]
        ops.adam_step_(
            self.master,
            self.momentum,
            self.variance,
            gradient,
            None,
            torch.tensor([[0, self.layout.numel]]),
            torch.tensor([row], dtype=torch.float64),
            torch.ones(()),
        )
        self.master, self.momentum, self.variance = (
            self._where(new, old)
            for new, old in zip((self.master, self.momentum, self.variance), before, strict=True)
        )
        self.parameters = [self._where(self.master.to(live.dtype), live)] * self.ranks

    def _averaged(self, momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return momentum * BETA1 + gradient * (1 - BETA1)

    def _set_momentum(self, momentum: torch.Tensor) -> None:
        self.momentum = self._where(momentum, self.momentum)

    def _descend(self) -> None:
        update = self.momentum / (self.variance.sqrt() + EPS)
        self.master = self._where(self.master * (1 - LR * DECAY) - update * LR, self.master)
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _where(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.where(self.included, new, old)

    def _mask(self, used: set[str]) -> torch.Tensor:
        mask = torch.zeros(self.layout.numel, dtype=torch.bool)
        for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True):
            mask[offset : offset + spec.numel] = spec.name in used
        return mask


def _compressed(values: torch.Tensor, errors: torch.Tensor, blocks: int) -> torch.Tensor:
    messages = torch.empty(blocks * ops.sign_payload_bytes(values.numel() // blocks), dtype=torch.uint8)
    ops.compress_1bit_(messages, errors, values, 1.0, blocks)
    return messages


def simulate(
    model: nn.Module, layouts: Sequence[FlatLayout], ranks: int, course: Course, loss_of: LossOf
) -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    """Every rank's losses [steps x micro-batches] and final parameters by name. ``model`` holds the first
    parameters, in float32."""
    named = dict(model.named_parameters())
    kind = SimulatedLamb if course.kind == "OneBitLamb" else Simulated
    units = [kind(layout, _flat(layout, named), ranks, course) for layout in layouts]
    scalings: dict[str, float] = {}
    for unit in units:
        if isinstance(unit, SimulatedLamb):
            unit.ratios, unit.factors, unit.scalings = {}, {}, scalings
    if course.dtype == "bf16":
        model.bfloat16()
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step, what in enumerate(exchanges(course)):
        sums: list[dict[str, torch.Tensor]] = []
        for rank in range(ranks):
            _load(named, units, rank)
            found: dict[str, torch.Tensor] = {}
            for micro in range(course.micro_batches):
                loss = loss_of(model, step, micro, rank)
                loss.backward()
                losses[rank].append(loss.item())
                for name, gradient in _included(named):
                    found[name] = found[name].float() + gradient.float() if name in found else gradient
            sums.append(found)
        used = {name for found in sums for name in found}
        if what == "scaled" and not scalings:
            sizes = {k: v for unit in units for k, v in unit.sizes().items()}
            united = sum(sizes.values()) / len(sizes)
            scalings.update((name, united / size if size else 1.0) for name, size in sizes.items())
        for unit in units:
            wide = torch.float32 if course.micro_batches > 1 else unit.layout.dtype
            unit.step(what, [_flat(unit.layout, found).to(wide) for found in sums], used)
    finals = []
    for rank in range(ranks):
        _load(named, units, rank)
        finals.append({name: value.detach().clone() for name, value in named.items()})
    return losses, finals


def _included(named: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = [(name, value.grad) for name, value in named.items() if value.grad is not None]
    for value in named.values():
        value.grad = None
    return found


def _flat(layout: FlatLayout, values: dict[str, Any]) -> torch.Tensor:
    flat = torch.zeros(layout.numel)
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        if spec.name in values:
            flat[offset : offset + spec.numel] = values[spec.name].detach().float().flatten()
    return flat


def _load(named: dict[str, Any], units: Sequence[Simulated], rank: int) -> None:
    with torch.no_grad():
        for unit in units:
            for spec, offset in zip(unit.layout.specs, unit.layout.offsets, strict=True):
                flat = unit.parameters[rank][offset : offset + spec.numel]
                named[spec.name].copy_(flat.view(spec.shape))


COEFF_BETA, FACTOR_MAX, FACTOR_MIN, THRESHOLD = 0.9, 4.0, 0.5, 0.1


class SimulatedLamb(Simulated):
    """One flat buffer; ``ratios`` and ``factors`` are the parameters' by name."""

    ratios: dict[str, float]
    factors: dict[str, float]
    scalings: dict[str, float]

    def step(self, what: str, gradients: Sequence[torch.Tensor], used: set[str]) -> None:
        if what == "full":
            self.included = self._mask(used)
            total = torch.zeros(self.layout.numel)
            for gradient in gradients:
                total = total + gradient.float()
            self._warm_up((total * (1 / self.ranks)).to(gradients[0].dtype).float(), used)
            return
        super().step(what, gradients, used)

    def blocks(self, used: set[str] | None = None) -> list[tuple[str, slice]]:
        return [
            (spec.name, slice(offset, offset + spec.numel))
            for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True)
            if used is None or spec.name in used
        ]

    def sizes(self) -> dict[str, float]:
        return {
            name: norm(self.momentum[block]) / math.sqrt(block.stop - block.start)
            for name, block in self.blocks()
        }

    def _raise_variance(self) -> None:
        super()._raise_variance()
        self.fresh = self.variance

    def _floors(self) -> list[slice]:
        return [block for _, block in self.blocks()]

    def _warm_up(self, gradient: torch.Tensor, used: set[str]) -> None:
        self._set_momentum(self._averaged(self.momentum, gradient))
        variance = self.variance * BETA2 + gradient * gradient * (1 - BETA2)
        self.variance = self.fresh = self._where(variance, self.variance)
        self.master = self.master.clone()
        for name, block in self.blocks(used):
            update = self._update(block)[0]
            weights, updates = norm(self.master[block]), norm(update)
            ratio = min(max(weights / updates, 0.01), 10.0) if weights and updates else 1.0
            if ratio != 1:
                self.ratios[name] = COEFF_BETA * self.ratios.get(name, 0.0) + (1 - COEFF_BETA) * ratio
            self.master[block] -= update * (LR * ratio)
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _scaled(self, gradients: list[torch.Tensor]) -> None:
        scaling = torch.ones(self.layout.numel, dtype=torch.float64)
        for name, block in self.blocks():
            scaling[block] = self.scalings[name]
        before = self.momentum
        sent = [self._where((self._averaged(before, each) * scaling.float()), before) for each in gradients]
        average = self._all_reduce(sent, self.included) if self.ranks > 1 else sent[0]
        self._set_momentum(average / scaling.float())
        implied = (self.momentum - before * BETA1) / (1 - BETA1)
        self.fresh = self._where(self.fresh * BETA2 + implied * implied * (1 - BETA2), self.fresh)
        self.master = self.master.clone()
        for name, block in self.blocks():
            if self.included[block].all():
                update, direction = self._update(block)
                self.master[block] -= update * (LR * self._ratio(name, block, norm(update), norm(direction)))
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _ratio(self, name: str, block: slice, update_norm: float, direction_norm: float) -> float:
        factor = float(((self.variance[block].sqrt() + EPS) / (self.fresh[block].sqrt() + EPS)).max())
        share = min(1.0, direction_norm / update_norm)
        factor = min(max(factor * share + (1 - share), FACTOR_MIN), FACTOR_MAX)
        last = self.factors.get(name, 1.0)
        factor = min(max(factor, last * (1 - THRESHOLD)), last * (1 + THRESHOLD))
        self.factors[name] = factor
        return self.ratios[name] * factor

    def _update(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        direction = self.momentum[block] / (self.variance[block].sqrt() + EPS)
        return direction + self.master[block] * DECAY, direction


def norm(values: torch.Tensor) -> float:
    total = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
    ops.squared_norm_(values.contiguous(), total)
    return float(ops.squared_norm_value(total).sqrt())
