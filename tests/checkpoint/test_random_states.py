"""The random states of many ranks in a manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_ext.checkpoint.api import random_states
from zero_ext.checkpoint.format.json_state import LARGEST_TENSOR_BYTES, decode, encode


class OneOfMany:
    """One rank of many. All others send its own values plus their rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, flat: torch.Tensor, shard: torch.Tensor, *_: Any) -> SimpleNamespace:
        shards = torch.arange(self.world_size, dtype=flat.dtype)[:, None] + shard.clone() - self.rank
        flat.copy_(shards.view(-1))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_encodes_them_and_their_number_is_not_limited(rank: int) -> None:
    own, ranks = torch.arange(5056, dtype=torch.uint8) + rank, 3400
    assert own.nbytes * ranks > LARGEST_TENSOR_BYTES
    states = random_states(OneOfMany(rank, ranks), own, "random states")  # type: ignore[arg-type]
    if rank:
        assert states == []
        return
    stored = decode(encode({"random": states}, "extra"), "extra")["random"]
    assert len(stored) == ranks
    assert all(torch.equal(each, own + number) for number, each in enumerate(stored))
