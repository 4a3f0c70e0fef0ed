"""Values compared between ranks by digests, also different values with equal checksums."""

from __future__ import annotations

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.comm.process_group import make_collectives
from zero_ext.zero.units.collective_errors import refuse_different

CASTAGNOLI = 0x1EDC6F41


def multiple_of_the_polynomial() -> torch.Tensor:
    """8 bytes that change no CRC32C: the bits of its polynomial, the highest power first."""
    bits = [1, *((CASTAGNOLI >> power) & 1 for power in range(31, -1, -1))]
    return torch.tensor(list(sum(bit << at for at, bit in enumerate(bits)).to_bytes(8, "little")))


@on_ranks(2)
@pytest.mark.parametrize("case", ["one element", "the same CRC32C", "a longer value"])
def test_different_values_are_refused(world: World, case: str) -> None:
    value = torch.randint(256, (64,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    other = value.clone()
    if case == "one element":
        other[5] ^= 1
    elif case == "the same CRC32C":
        other[16:24] ^= multiple_of_the_polynomial().to(torch.uint8)
        assert ops.crc32c(value) == ops.crc32c(other)
    else:
        other = torch.cat([value, torch.zeros(8, dtype=torch.uint8)])
    collectives = make_collectives(world.group, 20.0)
    refuse_different(collectives, "a write", value, "")
    refuse_different(collectives, "a write", value[:0], "")
    with pytest.raises(RuntimeError, match=r"got another on ranks \[1\] than on rank 0"):
        refuse_different(collectives, "a write", other if world.rank else value, "")
