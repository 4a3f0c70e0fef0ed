"""CRC32C against published values and the bit-by-bit definition."""

from __future__ import annotations

import random

import pytest
import torch

from zero_ext import ops


def reference(data: bytes, seed: int = 0) -> int:
    """The definition: divide by the Castagnoli polynomial one bit at a time."""
    state = ~seed & 0xFFFFFFFF
    for value in data:
        state ^= value
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return ~state & 0xFFFFFFFF


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.fixture
def generator() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print("random seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert ops.crc32c(tensor_of(data)) == expected


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 6143, 6144, 6145, 12295, 20000])
def test_equals_the_definition_at_any_alignment(length: int, generator: random.Random) -> None:
    offset, seed = generator.randrange(17), generator.randrange(2**32)
    data = generator.randbytes(offset + length)
    assert ops.crc32c(tensor_of(data)[offset:], seed) == reference(data[offset:], seed)


def test_continues_from_a_seed(generator: random.Random) -> None:
    data = tensor_of(generator.randbytes(30_000))
    cut = generator.randrange(30_001)
    assert ops.crc32c(data[cut:], ops.crc32c(data[:cut])) == ops.crc32c(data)


@pytest.mark.parametrize(
    ("bytes_", "seed", "named"),
    [
        (torch.zeros(8), 0, "'bytes': expected dtype .*, got Float"),
        (torch.zeros(2, 4, dtype=torch.uint8), 0, "'bytes': .*got shape"),
        (torch.zeros(8, dtype=torch.uint8)[::2], 0, "'bytes': expected a contiguous tensor"),
        (torch.zeros(8, dtype=torch.uint8), -1, "'seed': .*got -1"),
        (torch.zeros(8, dtype=torch.uint8), 2**32, "'seed': .*got 4294967296"),
    ],
)
def test_refuses_by_name(bytes_: torch.Tensor, seed: int, named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        ops.crc32c(bytes_, seed)


def test_opcheck(generator: random.Random) -> None:
    data = tensor_of(generator.randbytes(100))
    torch.library.opcheck(torch.ops.zero_ext.crc32c.default, (data, 7))
