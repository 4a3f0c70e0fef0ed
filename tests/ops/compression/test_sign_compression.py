"""Compression to signs against float64, against its one order of summation, and on bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, assert_same_on_all_isas_and_threads
from zero_ext import ops

BLOCK = ops.SIGN_BLOCK
COUNTS = [1, 31, 32, 257, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 300]
POISON = 0xA5


def poisoned(count: int) -> Tensor:
    return torch.full((count,), POISON, dtype=torch.uint8)


def compress(values: Tensor, errors: Tensor, factor: float = 1.0, chunks: int = 1) -> tuple[Tensor, Tensor]:
    """The messages, and the errors that are left."""
    messages = poisoned(chunks * ops.sign_payload_bytes(values.numel() // chunks))
    errors = errors.clone()
    ops.compress_1bit_(messages, errors, values, factor, chunks)
    return messages, errors


def read(message: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Signs as +-1 and scales of one message; the bits past the last element must be clear."""
    words = -(-count // 32)
    bits = np.unpackbits(message[: 4 * words].numpy(), bitorder="little")
    assert not bits[count:].any()
    scales = message[4 * words :].clone().view(torch.float32).numpy()
    return bits[:count].astype(np.float64) * 2 - 1, scales


def stands_for(message: Tensor, count: int) -> np.ndarray:
    bits, scales = read(message, count)
    return bits * scales.astype(np.float64).repeat(BLOCK)[:count]


def mean_magnitude(corrected: np.ndarray) -> np.float32:
    """Of a float32 block, in the order that the formula gives."""
    padded = np.zeros(BLOCK, dtype=np.float32)
    padded[: len(corrected)] = np.abs(corrected)
    lanes = np.zeros(256, dtype=np.float32)
    for row in padded.reshape(-1, 256):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0] / np.float32(len(corrected))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_compresses_what_is_corrected(
    isa: str, generator: torch.Generator, dtype: torch.dtype, count: int
) -> None:
    values = torch.randn(count, generator=generator).to(dtype)
    values[::7] = 0
    before = torch.randn(count, generator=generator)
    before[::14] = 0
    message, errors = compress(values, before, 0.3)
    exact = values.double().numpy() * float(np.float32(0.3)) + before.double().numpy()
    bits, scales = read(message, count)
    np.testing.assert_array_equal(bits, np.where(exact >= 0, 1.0, -1.0))
    for block, scale in enumerate(scales):
        mean = np.abs(exact[block * BLOCK : (block + 1) * BLOCK]).mean()
        np.testing.assert_allclose(scale, mean, rtol=1e-6)
    np.testing.assert_allclose(errors.numpy(), exact - stands_for(message, count), rtol=1e-6, atol=1e-6)


def test_sums_in_the_one_order_that_devices_share(isa: str, generator: torch.Generator) -> None:
    count = 2 * BLOCK + 777
    values, before = torch.randn(2, count, generator=generator) * 10 ** torch.linspace(-3, 3, count)
    message, errors = compress(values, before)
    corrected = (values + before).numpy()
    wanted = [mean_magnitude(corrected[begin : begin + BLOCK]) for begin in range(0, count, BLOCK)]
    np.testing.assert_array_equal(read(message, count)[1], np.array(wanted))
    left = corrected - stands_for(message, count).astype(np.float32)
    np.testing.assert_array_equal(errors.numpy(), left)


def test_errors_carry_what_is_left_to_the_next_time(isa: str, generator: torch.Generator) -> None:
    values = torch.randn(1000, generator=generator)
    errors, sent = torch.zeros(1000), np.zeros(1000)
    for _ in range(50):
        message, errors = compress(values, errors)
        sent += stands_for(message, 1000)
    np.testing.assert_allclose(sent + errors.double().numpy(), 50 * values.double().numpy(), atol=1e-3)


def test_chunks_are_separate_payloads(isa: str, generator: torch.Generator) -> None:
    chunks, each = 3, BLOCK + 45
    values, before = torch.randn(2, chunks * each, generator=generator)
    messages, errors = compress(values, before, 0.5, chunks)
    back = torch.full((chunks * each,), float("nan"))
    ops.decompress_1bit_(back, messages, 2.0, False, chunks)
    for chunk, message in enumerate(messages.view(chunks, -1)):
        own = slice(chunk * each, (chunk + 1) * each)
        alone, left = compress(values[own].clone(), before[own].clone(), 0.5)
        assert torch.equal(message, alone) and torch.equal(errors[own], left)
        np.testing.assert_array_equal(back[own].numpy(), (2 * stands_for(alone, each)).astype(np.float32))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("count", [1, 45, BLOCK + 77])
def test_expands_and_accumulates(
    isa: str, generator: torch.Generator, dtype: torch.dtype, count: int
) -> None:
    message, _ = compress(torch.randn(count, generator=generator), torch.zeros(count))
    wanted = torch.from_numpy(stands_for(message, count).astype(np.float32)) * 0.7
    out = torch.full((count,), float("nan"), dtype=dtype)
    ops.decompress_1bit_(out, message, 0.7, False, 1)
    assert torch.equal(out, wanted.to(dtype))
    old = torch.randn(count, generator=generator).to(dtype)
    out.copy_(old)
    ops.decompress_1bit_(out, message, 0.7, True, 1)
    assert torch.equal(out, (wanted + old.float()).to(dtype))


@pytest.mark.parametrize("senders", [1, 2, 5])
@pytest.mark.parametrize("count", [3, BLOCK + 301])
def test_sums_and_reduces_messages_in_order(
    isa: str, generator: torch.Generator, senders: int, count: int
) -> None:
    sent = [compress(torch.randn(count, generator=generator), torch.zeros(count))[0] for _ in range(senders)]
    messages = torch.cat(sent)
    total = np.zeros(count, dtype=np.float32)
    for message in sent:
        total = total + stands_for(message, count).astype(np.float32)
    out = torch.full((count,), float("nan"))
    ops.sum_1bit_(out, messages, 1 / 3, False)
    np.testing.assert_array_equal(out.numpy(), total * np.float32(1 / 3))
    old = torch.randn(count, generator=generator)
    out.copy_(old)
    ops.sum_1bit_(out, messages, 1 / 3, True)
    np.testing.assert_array_equal(out.numpy(), total * np.float32(1 / 3) + old.numpy())

    before = torch.randn(count, generator=generator)
    wanted, wanted_error = compress(torch.from_numpy(total), before, 0.25)
    message, error = poisoned(len(wanted)), before.clone()
    ops.reduce_1bit_(message, error, messages, 0.25)
    assert torch.equal(message, wanted) and torch.equal(error, wanted_error)


def test_zero_blocks_stay_exactly_zero(isa: str) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK : 2 * BLOCK] = -0.0
    message, errors = compress(values, torch.zeros(3 * BLOCK))
    out = torch.full((3 * BLOCK,), float("nan"))
    ops.sum_1bit_(out, torch.cat([message, message]), 0.5, False)
    assert torch.equal(out, values) and not errors.any()
    assert not torch.signbit(out[BLOCK : 2 * BLOCK]).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_is_seen_in_all_of_its_block(
    isa: str, generator: torch.Generator, bad: float
) -> None:
    values = torch.randn(3 * BLOCK, generator=generator)
    values[BLOCK + 5] = bad
    message, _ = compress(values, torch.zeros(3 * BLOCK))
    reduced = poisoned(len(message))
    ops.reduce_1bit_(reduced, torch.zeros(3 * BLOCK), torch.cat([message, message]), 0.5)
    for each in (message, reduced):
        out = torch.zeros(3 * BLOCK)
        ops.decompress_1bit_(out, each, 1.0, False, 1)
        finite = out.isfinite().view(3, BLOCK)
        assert finite[0].all() and not finite[1].any() and finite[2].all()


def test_instruction_sets_and_threads_agree_bit_for_bit(generator: torch.Generator) -> None:
    chunks, each = 2, 11 * BLOCK + 333
    values = torch.randn(chunks * each, generator=generator).bfloat16()
    before = torch.randn(chunks * each, generator=generator)

    def everything() -> list[Tensor]:
        messages, errors = compress(values, before, 0.3, chunks)
        half = values.half()
        ops.decompress_1bit_(half, messages, 0.7, True, chunks)
        total, error = torch.empty(each), before[:each].clone()
        ops.sum_1bit_(total, messages, 0.5, False)
        message = poisoned(len(messages) // chunks)
        ops.reduce_1bit_(message, error, messages, 0.5)
        return [messages, errors, half, total, message, error]

    assert_same_on_all_isas_and_threads(everything)


def test_message_bytes() -> None:
    assert [ops.sign_payload_bytes(n) for n in (0, 1, 32, 33, 8192, 8193)] == [0, 8, 8, 12, 1028, 1036]
    empty = torch.empty(0)
    messages, errors = compress(empty, empty, chunks=4)
    assert len(messages) == len(errors) == 0


def test_refuses_wrong_arguments_by_name(generator: torch.Generator) -> None:
    values, errors = torch.randn(2, 90, generator=generator)
    messages = poisoned(3 * ops.sign_payload_bytes(30))
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((messages, errors, values.double(), 1.0, 3), "argument 'values': expected dtype .*, got Double"),
        ((messages, errors.half(), values, 1.0, 3), "argument 'errors': expected dtype .*, got Half"),
        ((messages, errors[:89], values, 1.0, 3), "argument 'errors': .*got shape"),
        ((messages.view(torch.int8), errors, values, 1.0, 3), "argument 'payloads': .*got Char"),
        ((messages[:-4], errors, values, 1.0, 3), "argument 'payloads': .*got shape"),
        ((poisoned(25)[1:], errors, values, 1.0, 3), "an address that is a multiple of 4"),
        ((messages, errors, values, 1.0, 4), "elements: expected a multiple of the 4 chunks, got 90"),
        ((messages, errors, values, 1.0, 0), "of the 0 chunks, got 90"),
        ((messages, errors, values, float("nan"), 3), "factor: .*got nan"),
        ((messages, values, values, 1.0, 3), "expected its own memory"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=f"compress_1bit_.*{message}"):
            ops.compress_1bit_(*arguments)  # type: ignore[arg-type]
    assert (messages == POISON).all()
    with pytest.raises(RuntimeError, match=r"sum_1bit_.*one or more payloads of 16 bytes"):
        ops.sum_1bit_(errors, messages[:20], 1.0, False)
    with pytest.raises(RuntimeError, match=r"reduce_1bit_.*'payload': .*got shape"):
        ops.reduce_1bit_(messages, errors, messages, 1.0)
    with pytest.raises(RuntimeError, match=r"decompress_1bit_.*'out': expected dtype .*, got Long"):
        ops.decompress_1bit_(torch.zeros(90, dtype=torch.int64), messages, 1.0, False, 3)
