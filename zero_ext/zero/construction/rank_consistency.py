"""Comparison of what all ranks have to share: optimizer, configuration, model and learning rates."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.config_errors import shortened
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.units.collective_errors import CHECKSUM_RANGE
from zero_ext.zero.units.parameter_marks import expert_ranks, packed_shapes

_FIELD_BYTES = 256  # of a name or a value in an error


class Fact(NamedTuple):
    """One thing that all ranks have to share: its name and this rank's value."""

    name: str
    value: str


def check_agreement(
    owned: Sequence[OwnedParameter],
    config: ZeroConfig,
    collectives: Collectives,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Compare the optimizer, the configuration and the model of all ranks; a collective.

    Experts differ by name. ``RuntimeError`` on all ranks names the first difference.
    """
    if collectives.world_size == 1:
        return
    groups = optimizer.param_groups if optimizer is not None else ()
    name = "none" if optimizer is None else type(optimizer).__qualname__
    facts = [Fact("optimizer", name), Fact("optimizer param groups", str(len(groups)))]
    if optimizer is not None:
        facts += Hyperparameters(groups, optimizer.defaults).facts()
    facts += _configuration_facts(config)
    group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
    facts += [_parameter_fact(number, item, group_of) for number, item in enumerate(owned)]
    refuse_different_facts(
        collectives,
        facts,
        "Build the same model and optimizer with the same configuration on every rank. Nothing was changed.",
    )


def _configuration_facts(config: ZeroConfig) -> Iterator[Fact]:
    # Each rank may have devices of its own, and write down what it likes.
    paths = {section: {"nvme_paths"} for section in ("offload", "activation_checkpointing")}
    values = config.model_dump(mode="json", exclude={"aio": True, "monitor": True, **paths})
    for path, value in _flattened("", values):
        yield Fact(f"configuration key '{path}'", json.dumps(value))


def _flattened(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(f"{prefix}{key}.", value)
        else:
            yield prefix + key, value


def _parameter_fact(number: int, item: OwnedParameter, group_of: Mapping[Any, int]) -> Fact:
    parameter = item.parameter
    value = [
        "an expert's" if expert_ranks(parameter) else item.spec.name,
        item.spec.shape,
        str(parameter.dtype),
        "trainable" if parameter.requires_grad else "frozen",
        f"param group {group_of[parameter]}" if parameter in group_of else "in no param group",
        *packed_shapes(parameter),
    ]
    return Fact(f"parameter number {number}", json.dumps(value))


class Hyperparameters:
    """The settings of an optimizer's live param groups that its class has defaults for.

    Settings that are not plain values, or that are in a device's memory, are left out.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
        self._groups, self._names = groups, tuple(names)

    def checksum(self) -> int:
        """Return a number from 1 on that is the same on ranks with the same settings."""
        values = [[_plain(group.get(name)) for name in self._names] for group in self._groups]
        return 1 + zlib.crc32(repr(values).encode()) % CHECKSUM_RANGE

    def facts(self) -> Iterator[Fact]:
        """Yield each setting of each group."""
        for number, group in enumerate(self._groups):
            for name in self._names:
                yield Fact(f"optimizer param group {number}, '{name}'", repr(_plain(group.get(name))))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | complex | str) else None


def refuse_different_facts(collectives: Collectives, facts: Sequence[Fact], advice: str) -> None:
    """Raise ``RuntimeError`` on all ranks unless all have the same ``facts`` in the same order; a collective.

    It names the first rank that differs from rank 0, its first fact that does and both values, and ends with
    ``advice``.
    """
    # Models agree as a rule, so one digest per rank is compared first. Single facts follow only
    # after a difference, which all ranks have seen by then.
    own = torch.tensor([_digest(repr(fact)) for fact in facts], dtype=torch.int64, device="cpu")
    totals = of_all_ranks(collectives, torch.tensor([_digest(repr(own.tolist())), len(own)], device="cpu"))
    received = totals[totals[:, 1] > 0]  # One rank that simulates the others receives nothing from them.
    if bool((received == received[0]).all()):
        return
    wanted = own if collectives.rank == 0 else torch.empty(int(totals[0, 1]), dtype=torch.int64, device="cpu")
    collectives.broadcast_(wanted, 0, "agreement of the ranks, each fact")
    common = min(len(own), len(wanted))
    differing = (own[:common] != wanted[:common]).nonzero()
    mine = int(differing[0]) if len(differing) else common if len(own) != len(wanted) else -1
    firsts = of_all_ranks(collectives, torch.tensor([mine], device="cpu")).flatten().tolist()
    ranks = [rank for rank, first in enumerate(firsts) if first >= 0]
    first = firsts[ranks[0]]
    fact = facts[first] if first < len(facts) else Fact("nothing more", "nothing")
    fields = json.dumps([shortened(text, _FIELD_BYTES) for text in fact])
    texts = bytes_of_all_ranks(collectives, fields.encode())
    expected, got = (Fact(*json.loads(texts[rank])) for rank in (0, ranks[0]))
    name = got.name if got.name == expected.name else f"{got.name} where rank 0 has {expected.name}"
    raise RuntimeError(
        f"rank {collectives.rank}: {name}: expected {expected.value} on all ranks, as on rank 0, got "
        f"{got.value} on rank {ranks[0]}. Ranks {ranks} differ from rank 0. {advice}"
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def of_all_ranks(
    collectives: Collectives, own: torch.Tensor, label: str = "agreement of the ranks"
) -> torch.Tensor:
    """Return the 1-D ``own`` of every rank, all of one size, in rank order; a collective."""
    table = torch.zeros(collectives.world_size, len(own), dtype=own.dtype, device="cpu")
    table[collectives.rank] = own
    collectives.gather(table.view(-1), table[collectives.rank], "scalars", label).wait()
    return table


def bytes_of_all_ranks(
    collectives: Collectives, own: bytes, label: str = "agreement of the ranks"
) -> list[bytes]:
    """Return the ``own`` of every rank, of any size but zero, in rank order; a collective.

    Simulated ranks send nothing, so theirs are empty.
    """
    size = torch.tensor([len(own)], device="cpu")
    sizes = of_all_ranks(collectives, size, label).flatten().tolist()
    padded = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    table = of_all_ranks(collectives, padded, label)
    return [bytes(row[:size].tolist()) for row, size in zip(table, sizes, strict=True)]
