"""Expert parallelism: a mixture of experts, each on some of the data-parallel ranks; tokens go there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.zero.units.parameter_marks import mark_expert
from zero_ext.zero.units.rank_groups import data_group

__all__ = ["MixtureOfExperts", "MoEOutput", "Routing", "balance_loss", "route"]
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeExpert = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Routing:
    """The choices of T tokens among E experts, K each, the best first.

    Attributes:
        experts: [K, T] int64, the experts chosen.
        weights: [K, T] float32, what their outputs are multiplied with.
        probabilities: [T, E] float32, the gate's.
        order: [routed] int64, the choices within the capacity of their expert, as numbers `choice * T +
            token`: by expert, for each the first choices before the second ones, in the order of the tokens.
        counts: [E] int64, the choices within capacity of each expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor

    @property
    def first_choices(self) -> torch.Tensor:
        """Tokens by their first choice, [E] int64, whether its capacity suffices or not."""
        return _count(self.experts[0], self.probabilities.shape[1])


def route(logits: torch.Tensor, top_k: int = 2, capacity_factor: float | None = None) -> Routing:
    """Send each token to the experts with the largest logits, in float32.

    A choice's weight is its probability's share of those of all choices of the token. With one choice it is
    the probability itself, or the gate would learn nothing. The second expert is always asked, not at random
    as in GShard.

    Source: Lepikhin et al., "GShard" (arXiv 2006.16668), section 2.2; Fedus et al., "Switch Transformers"
    (arXiv 2101.03961), section 2.1.

    Args:
        logits: [T, E].
        top_k: experts of a token.
        capacity_factor: None drops nothing. Otherwise an expert takes `ceil(capacity_factor * top_k * T / E)`
            of these tokens and the others go without it; weights stay as they are.

    Returns:
        The choices.
    """
    tokens, experts = logits.shape
    probabilities = torch.softmax(logits.float(), dim=-1)
    best, chosen = probabilities.topk(top_k, dim=-1)
    weights = best / best.sum(-1, keepdim=True) if top_k > 1 else best
    flat = chosen.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = _count(flat, experts)
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * top_k * tokens / experts)
        sorted_experts = flat[order]
        positions = (
            torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[sorted_experts]
        )
        order, counts = order[positions < capacity], counts.clamp(max=capacity)
    return Routing(chosen.t(), weights.t(), probabilities, order, counts)


def balance_loss(first_choices: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the auxiliary loss that keeps experts equally busy.

    It is E times the sum over the experts of the share of first choices that they have and their mean
    probability. It is GShard's, times E squared, as later work has it. Its gradient goes through the
    probabilities alone, so with the first choices of all ranks, which bring equally many tokens, the mean of
    the ranks' losses is that of all their tokens.

    Args:
        first_choices: [E], tokens by their first choice.
        probabilities: [T, E].

    Returns:
        0-d float32; 1 where all experts are equal.
    """
    share = first_choices.float() / first_choices.sum().clamp(min=1)
    mean = probabilities.sum(0) / max(len(probabilities), 1)
    return len(share) * (share * mean).sum()


def _count(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of ``number`` experts occurs."""
    counts = torch.zeros(number, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))


def through_experts(
    rows: torch.Tensor, counts: torch.Tensor, experts: Experts, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the experts' outputs of ``rows`` [R, width], which are sorted by expert, ``counts`` [E] int64 of
    each. A collective of ``group`` with E / N experts per rank.

    ``experts`` is called once, with the rows of all ranks for the experts of this one, sorted by expert and
    then by rank, and the number of each expert's. It is called without rows too, so that parameters have a
    gradient on every rank. Without a group it has all experts. Two all-to-all exchanges move rows, and as
    many in backward (GShard, section 3.1).
    """
    if group is None:
        return experts(rows, counts)
    ranks = dist.get_world_size(group)
    sent = counts.view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
    rows = _exchanged(rows, sends, receives, group)
    # They came by rank and, of each, by expert.
    numbers = torch.arange(sent.shape[1], device=rows.device).repeat(ranks)
    by_expert = torch.argsort(numbers.repeat_interleave(received.view(-1)), stable=True)
    outputs = experts(rows[by_expert], received.sum(0))
    return _exchanged(outputs[torch.argsort(by_expert)], receives, sends, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """``sends[r]`` of ``rows`` go to each rank r, ``receives[r]`` come from it, in the order of the ranks."""
    exchanged: torch.Tensor = _AllToAll.apply(rows, sends, receives, group)
    return exchanged


class MoEOutput(NamedTuple):
    """The output of a mixture of experts.

    Attributes:
        hidden: of the input's shape and dtype.
        aux_loss: the auxiliary loss (0-d float32, see
            [`balance_loss`][zero_ext.parallel.experts.balance_loss]), to be added to the model's with a small
            weight, 0.01 in GShard.
        dropped_tokens: 0-d int64, how many choices of this rank's tokens found their expert full.
    """

    hidden: torch.Tensor
    aux_loss: torch.Tensor
    dropped_tokens: torch.Tensor


class MixtureOfExperts(nn.Module):
    """Send each token to `top_k` of `count` experts and sum what they return, weighted.

    Along "ep" of `mesh` ranks have different experts, equally many neighbors each. Without a mesh, or "ep" in
    it, every rank has all of them. Parameters are called `gate.weight` and `experts.<number>.<name>`, the
    number that in the full mixture. Probabilities are computed in float32. Every forward, in evaluation too,
    is a collective of the ranks along "ep", and of all data-parallel ones that count first choices.

    Source: GShard, Lepikhin et al. (arXiv 2006.16668), section 2.2; DeepSpeed-MoE, Rajbhandari et al. (arXiv
    2201.05596).

    Args:
        width: elements of a token.
        experts: modules from [tokens, width] to the same shape, or a function that makes the one
            of a number: then each rank makes only its own, with random values that depend on torch's seed and
            the number, not on the rank that makes it.
        count: number of experts; needed with a function.
        mesh: the ranks, see [`make_mesh`][zero_ext.parallel.make_mesh].
        top_k: experts of a token.
        capacity_factor: None sends every token to its experts. Otherwise each expert takes no more of a
            rank's tokens than that many times its equal share ([`route`][zero_ext.parallel.experts.route]),
            and a token which finds all of its experts full becomes zero: add the output to the input.

    Attributes:
        count: number of experts.
        top_k: as given.
        capacity_factor: as given.

    Raises:
        ValueError: alike on all ranks, fewer experts than `top_k`, a number of them that the ranks do not
            divide, a capacity that is not positive, and experts with buffers or with parameters of different
            shapes.

    Examples:
        >>> from zero_ext.parallel.experts import MixtureOfExperts
        >>> mixture = MixtureOfExperts(8, lambda number: torch.nn.Linear(8, 8), count=4)
        >>> output = mixture(torch.ones(2, 5, 8))
        >>> output.hidden.shape, output.dropped_tokens.item()
        (torch.Size([2, 5, 8]), 0)
    """

    def __init__(
        self,
        width: int,
        experts: Iterable[nn.Module] | MakeExpert,
        count: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        top_k: int = 2,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        listed = list(experts) if isinstance(experts, Iterable) else experts
        self.count = _count_of(listed, count)
        self.top_k, self.capacity_factor = top_k, capacity_factor
        spread = mesh["ep"] if mesh is not None and "ep" in (mesh.mesh_dim_names or ()) else None
        ranks, index = (spread.size(), spread.get_local_rank()) if spread is not None else (1, 0)
        _check(self.count, ranks, top_k, capacity_factor)
        self._group = spread.get_group() if spread is not None and ranks > 1 else None
        self._data = data_group(mesh) if mesh is not None else None
        self.gate = nn.Linear(width, self.count, bias=False)
        own = self.count // ranks
        numbers = range(index * own, (index + 1) * own)
        known = dict(enumerate(listed)) if isinstance(listed, list) else _made(listed, numbers)
        self.experts = nn.ModuleDict({str(number): known[number] for number in numbers})
        _agree(_problem(known), self._group, mesh)
        if self._group is not None:
            for parameter in self.experts.parameters():
                mark_expert(parameter, dist.get_process_group_ranks(self._group))

    def extra_repr(self) -> str:
        """Return the settings as `repr` shows them.

        Returns:
            The text between the parentheses.
        """
        return f"{self.count} experts, top_k={self.top_k}, capacity_factor={self.capacity_factor}"

    def forward(self, hidden: torch.Tensor) -> MoEOutput:
        """Mix what the experts make of tokens; a collective.

        Args:
            hidden: [..., width].

        Returns:
            The mixture, the auxiliary loss and the number of dropped choices.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        with torch.autocast(hidden.device.type, enabled=False):
            logits = nn.functional.linear(tokens.float(), self.gate.weight.float())
        routing = route(logits, self.top_k, self.capacity_factor)
        rows = tokens[routing.order % len(tokens)]
        made = through_experts(rows, routing.counts, self._call_experts, self._group)
        slots = made.new_zeros(routing.experts.numel(), made.shape[-1]).index_copy(0, routing.order, made)
        weighted = routing.weights.unsqueeze(-1) * slots.view(*routing.experts.shape, made.shape[-1])
        first_choices = routing.first_choices
        if self._data is not None:
            dist.all_reduce(first_choices, group=self._data)
        return MoEOutput(
            weighted.sum(0).to(hidden.dtype).view(hidden.shape),
            balance_loss(first_choices, routing.probabilities),
            routing.experts.numel() - routing.counts.sum(),
        )

    def _call_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's experts, ``counts`` rows of each."""
        inputs = rows.split(counts.tolist())
        return torch.cat([expert(own) for expert, own in zip(self.experts.values(), inputs, strict=True)])


def _count_of(experts: list[nn.Module] | MakeExpert, count: int | None) -> int:
    if not isinstance(experts, list):
        if count is None:
            raise ValueError(
                "count of MixtureOfExperts: expected the number of experts that the function 'experts' "
                "makes, got None. Pass it."
            )
        return count
    if count not in (None, len(experts)):
        raise ValueError(
            f"count of MixtureOfExperts: expected {len(experts)}, the number of experts given, got {count}. "
            "Leave it out with a list of experts."
        )
    return len(experts)


def _check(count: int, ranks: int, top_k: int, capacity_factor: float | None) -> None:
    if not 1 <= top_k <= count:
        raise ValueError(
            f"top_k of MixtureOfExperts: expected 1 to {count}, as each token goes to 'top_k' different "
            f"experts of {count}, got {top_k}. Change it, or give more experts."
        )
    if count % ranks:
        raise ValueError(
            f"experts of MixtureOfExperts: expected as many on each of the {ranks} ranks along 'ep' of the "
            f"mesh, got {count} experts. Set 'ep' to a divisor of {count}, or use a multiple of {ranks} "
            "experts."
        )
    if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
        raise ValueError(
            "capacity_factor of MixtureOfExperts: expected a positive finite number or None, got "
            f"{capacity_factor}. Set it to 1 for equal shares, or to None to drop nothing."
        )


def _made(make: MakeExpert, numbers: Sequence[int]) -> dict[int, nn.Module]:
    """Return the experts ``numbers``, with values that ranks with other numbers do not change."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    made = {}
    for number in numbers:
        with torch.random.fork_rng():
            torch.manual_seed(seed + number)
            made[number] = make(number)
    return made


def _problem(experts: Mapping[int, nn.Module]) -> str:
    """Why these, by number, cannot be the experts of one mixture; empty if they can."""
    first = min(experts)
    wanted = [(name, parameter.shape) for name, parameter in experts[first].named_parameters()]
    for number, expert in experts.items():
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            return (
                f"expert {number}: expected no buffers, as ranks with different experts would treat them as "
                f"the same ones, got {buffers}. Keep them outside of the experts."
            )
        shapes = [(name, parameter.shape) for name, parameter in expert.named_parameters()]
        if shapes != wanted:
            return (
                f"expert {number}: expected the parameters of expert {first}, {wanted}, got {shapes}. Build "
                "all experts alike."
            )
    return ""


def _agree(problem: str, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` if one has a ``problem``."""
    problems = torch.tensor(bool(problem), device=mesh.device_type if mesh is not None else "cpu").int()
    if group is not None:
        dist.all_reduce(problems, group=group)
    if problems:
        elsewhere = "another rank along 'ep' refused its experts. See the error of that rank."
        raise ValueError(f"MixtureOfExperts: {problem or elsewhere}")
