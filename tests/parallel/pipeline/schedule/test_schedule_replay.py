"""Steps again with other durations, against the closed forms of GPipe and 1F1B."""

import random
from dataclasses import replace

import pytest

from zero_ext.parallel.pipeline import Slot, bubble_bound, busy_fraction, replay


def gpipe(stages: int, micro_batches: int) -> list[list[Slot]]:
    """All forwards, then all backwards in reverse."""
    return [
        [Slot("forward", rank, number, 0.0, 1.0) for number in range(micro_batches)]
        + [Slot("backward", rank, number, 0.0, 2.0) for number in reversed(range(micro_batches))]
        for rank in range(stages)
    ]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Slot]]:
    """As many forwards first as there are stages from here to the end, then in turn."""
    ranks = []
    for rank in range(stages):
        ahead = min(stages - rank, micro_batches)
        kinds = ["forward"] * ahead
        for _ in range(micro_batches - ahead):
            kinds += ["backward", "forward"]
        kinds += ["backward"] * ahead
        counts = {"forward": 0, "backward": 0}
        slots = []
        for kind in kinds:
            slots.append(Slot(kind, rank, counts[kind], 0.0, 1.0 if kind == "forward" else 2.0))
            counts[kind] += 1
        ranks.append(slots)
    return ranks


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
def test_the_bubble_is_that_of_the_closed_form(order) -> None:
    stages, micro_batches = random.randint(1, 6), random.randint(6, 20)
    ranks = order(stages, micro_batches)
    placed = replay(ranks, lambda slot: slot.seconds)
    end = max(slot.began + slot.seconds for slots in placed for slot in slots)
    assert end == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert bubble_bound(ranks) == pytest.approx(micro_batches / (micro_batches + stages - 1))
    assert busy_fraction(placed) == pytest.approx(bubble_bound(ranks))


def test_only_exchanges_between_ranks_cost_time() -> None:
    placed = replay(gpipe(2, 1), lambda slot: 1.0, exchange_seconds=0.25)
    assert [(slot.what, slot.began) for slot in placed[0]] == [("forward", 0.0), ("backward", 3.5)]
    assert [(slot.what, slot.began) for slot in placed[1]] == [("forward", 1.25), ("backward", 2.25)]
    both = [gpipe(2, 1)[0][:1] + gpipe(2, 1)[1] + gpipe(2, 1)[0][1:]]
    assert busy_fraction(replay(both, lambda slot: 1.0, exchange_seconds=0.25)) == 1.0


def test_a_slow_stage_holds_up_the_others_but_not_the_bound() -> None:
    ranks = gpipe(4, 16)
    placed = replay(ranks, lambda slot: slot.seconds * (2.0 if slot.stage == 2 else 1.0))
    assert busy_fraction(placed) < 0.75 * bubble_bound(placed)


def test_weight_gradients_wait_for_their_backward_alone() -> None:
    slots = [Slot(what, 0, 0, 0.0, 1.0) for what in ("forward", "backward", "weights")]
    assert [slot.began for slot in replay([slots], lambda slot: 1.0)[0]] == [0.0, 1.0, 2.0]


def test_orders_that_cannot_run_are_refused() -> None:
    ranks = gpipe(2, 2)
    with pytest.raises(ValueError, match=r"rank 0: it waits forever at Slot\(what='backward', stage=0"):
        replay(
            [[replace(slot, micro_batch=slot.micro_batch + 5) for slot in ranks[0]], ranks[1]], lambda _: 1.0
        )
