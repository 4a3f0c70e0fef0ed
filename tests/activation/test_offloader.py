"""Records in the order of their calls: what is prefetched, what is present, and the cost of both."""

from __future__ import annotations

import random

import pytest
import torch

from tests.activation.blocks import fresh_seed, noted_records
from tests.opcodes import count_opcodes
from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation.activation_storage import MemoryActivationStorage
from zero_ext.activation.offloader import ActivationOffloader, ActivationRecord, OrderedWeakList, RecordState
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.offload import CPU


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


def test_an_ordered_weak_list_drops_dead_items() -> None:
    draw, items, plain = random.Random(fresh_seed()), OrderedWeakList(), list[Item]()
    for number in range(1, 2000):
        if plain and draw.random() < 0.45:
            del plain[draw.randrange(len(plain))]
        else:
            plain.append(Item(number))
            items.add(plain[-1])
        assert len(items) == len(plain)
        if plain:
            index = draw.randrange(len(plain))
            assert list(items.before(plain[index])) == plain[:index][::-1]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_calls_before_are_fetched_while_one_is_computed(prefetch: int) -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host", prefetch=prefetch))
    records: list[ActivationRecord] = []
    seen: list[list[RecordState]] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append([record.state for record in records])
        return x.sin()

    hidden = torch.ones(64, 64, requires_grad=True) * 1
    with noted_records(records):
        for _ in range(4):
            hidden = checkpointing(noting, hidden)
    del seen[:]
    hidden.sum().backward()
    for last, states in zip((3, 2, 1, 0), seen, strict=True):
        ahead = min(prefetch, last)
        wanted = [RecordState.OFFLOADED] * (last - ahead) + [RecordState.FETCHING] * ahead
        assert states[:last] == wanted and states[last:] == [RecordState.OFFLOADED] * (4 - last)


def test_a_repeated_argument_is_fetched_once() -> None:
    """(x, y, x): all three come of one fetch, and nothing is left on the device when they were handed out."""
    torch.manual_seed(fresh_seed())
    checkpointing, events = (
        ActivationCheckpointing(ActivationCheckpointingConfig(tier="host", profile=True)),
        [],
    )
    checkpointing.bus.subscribe(events.append)
    first, second = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    records: list[ActivationRecord] = []
    with noted_records(records):
        out = checkpointing(lambda x, y, z: x * y.sin() * z, x := first * 1, second * 1, x)
    del x
    for _ in range(2):
        slopes = torch.autograd.grad(out.sum(), (first, second), retain_graph=True)
        assert torch.allclose(slopes[1], first.detach().square() * second.detach().cos())
        assert torch.allclose(slopes[0], 2 * first.detach() * second.detach().sin())
        assert [each.state for each in records] == [RecordState.OFFLOADED]
    assert [event.what for event in events].count("fetch") == 2


def test_the_cost_of_a_record_does_not_depend_on_their_number() -> None:
    """What autograd saves in one forward may be thousands of tensors."""
    offloader, values = (
        ActivationOffloader(MemoryActivationStorage("host", CPU), torch.device("cpu")),
        torch.zeros(16),
    )
    records: list[ActivationRecord] = []

    def offload() -> None:
        records.append(offloader.offload([values], "many"))

    def fetch() -> None:
        offloader.fetch(records[at], 0)

    offload_costs = []
    for number in range(4000):
        if number % 1000 == 999:
            offload_costs.append(count_opcodes(offload))
        else:
            offload()
    assert max(offload_costs) < 1.5 * min(offload_costs), offload_costs
    fetching = []
    for at in reversed(range(len(records))):
        if at % 1000 == 500:  # the first one among 4000, the last one with 500 before it
            fetching.append(count_opcodes(fetch))
        else:
            fetch()
    assert max(fetching) < 1.5 * min(fetching), fetching


def test_saved_tensors_cost_the_same_however_many_there_are() -> None:
    values = {"mode": "offload_saved_tensors", "tier": "host", "min_offload_bytes": 0}
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**values))
    found: list[int] = []
    hidden = torch.zeros(16, requires_grad=True)

    def save() -> None:
        nonlocal hidden
        hidden = hidden.sin()

    with checkpointing.saved_tensors():
        for number in range(4000):
            # Now and then it looks through all: what counts is the sum of a stretch.
            if number % 1000 < 500:
                save()
            else:
                found.append(count_opcodes(save))
    stretches = [sum(found[begin : begin + 500]) for begin in range(0, 2000, 500)]
    assert max(stretches) < 1.5 * min(stretches), stretches
    hidden.sum().backward()
