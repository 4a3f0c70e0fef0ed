"""A mixture of experts as a module. Every rank builds its own experts only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.experts.gating import balance_loss, route
from zero_ext.parallel.experts.token_dispatch import through_experts
from zero_ext.zero.units.parameter_marks import mark_expert
from zero_ext.zero.units.rank_groups import data_group

MakeExpert = Callable[[int], nn.Module]


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
            the number, not on who makes it.
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
        spread = mesh if mesh is not None and "ep" in (mesh.mesh_dim_names or ()) else None
        ranks, index = (spread["ep"].size(), spread.get_local_rank("ep")) if spread is not None else (1, 0)
        _check(self.count, ranks, top_k, capacity_factor)
        self._group = spread["ep"].get_group() if spread is not None and ranks > 1 else None
        self._data = data_group(mesh) if mesh is not None else None
        self.gate = nn.Linear(width, self.count, bias=False)
        own = self.count // ranks
        numbers = range(index * own, (index + 1) * own)
        made = [listed[n] for n in numbers] if isinstance(listed, list) else _made(listed, numbers)
        self.experts = nn.ModuleDict({str(n): expert for n, expert in zip(numbers, made, strict=True)})
        known = dict(enumerate(listed)) if isinstance(listed, list) else dict(zip(numbers, made, strict=True))
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
        made = through_experts(rows, routing.counts, list(self.experts.values()), self._group)
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


def _made(make: MakeExpert, numbers: Sequence[int]) -> list[nn.Module]:
    """Return the experts ``numbers``, with values that ranks with other numbers do not change."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    made = []
    for number in numbers:
        with torch.random.fork_rng():
            torch.manual_seed(seed + number)
            made.append(make(number))
    return made


def _problem(experts: Mapping[int, nn.Module]) -> str:
    """Why these, by number, cannot be the experts of one mixture; empty if they can."""
    shapes: list[list[tuple[str, torch.Size]]] = []
    first = min(experts)
    for number, expert in experts.items():
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            return (
                f"expert {number}: expected no buffers, as ranks with different experts would treat them as "
                f"the same ones, got {buffers}. Keep them outside of the experts."
            )
        shapes.append([(name, parameter.shape) for name, parameter in expert.named_parameters()])
        if shapes[-1] != shapes[0]:
            return (
                f"expert {number}: expected the parameters of expert {first}, {shapes[0]}, got {shapes[-1]}. "
                "Build all experts alike."
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
