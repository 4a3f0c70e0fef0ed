"""Quantization to blocks of integers against float64 and its bounds, and on bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.compression.test_sign_compression import poisoned
from tests.ops.helpers import FLOAT_DTYPES, assert_same_on_all_isas_and_threads
from zero_ext import ops
from zero_ext.ops.compression import BlockFormat

FORMATS = [BlockFormat(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]
BITS = {True: "symmetric", False: "asymmetric"}
COUNTS = [1, 7, 8, 9, 255, 256, 257, 5003]
ROUNDING = 2.0**-24

each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"int{f.bits}-{BITS[f.symmetric]}")


def quantize(values: Tensor, format: BlockFormat, chunks: int = 1, order: list[int] | None = None) -> Tensor:
    messages = poisoned(chunks * format.payload_bytes(values.numel() // chunks))
    ops.quantize_(messages, values, format, chunks, order)
    return messages


def dequantize(
    messages: Tensor, count: int, format: BlockFormat, chunks: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full((count,), float("nan"), dtype=dtype)
    ops.dequantize_(out, messages, format, chunks)
    return out


def read(message: Tensor, count: int, format: BlockFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [count], and per element its block's scale and lowest value, in float64."""
    fields, codes, first = 32 // format.bits, [], 0
    blocks = -(-count // format.block)
    for begin in range(0, count, format.block):
        length = min(format.block, count - begin)
        words = -(-length // 8) * 8 // fields
        packed = message[4 * first : 4 * (first + words)].clone().view(torch.int32).numpy().view(np.uint32)
        shifts = np.arange(fields, dtype=np.uint32)[:, None] * np.uint32(format.bits)
        block = ((packed[None, :] >> shifts) & np.uint32(2**format.bits - 1)).reshape(-1)
        assert (block[length:] == block[0]).all()
        codes.append(block[:length])
        first += words
    scales = message[4 * first :].clone().view(torch.float32).double().numpy().reshape(blocks, -1)
    lowest = -(2 ** (format.bits - 1)) * scales[:, 0] if format.symmetric else scales[:, 1]
    per_element = [each.repeat(format.block)[:count] for each in (scales[:, 0], lowest)]
    return np.concatenate(codes).astype(np.float64), per_element[0], per_element[1]


def extremes(exact: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest of each element's block."""
    starts = np.arange(0, len(exact), block)
    found = (np.minimum.reduceat(exact, starts), np.maximum.reduceat(exact, starts))
    return found[0].repeat(block)[: len(exact)], found[1].repeat(block)[: len(exact)]


def check_message(message: Tensor, exact: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Scales and codes against their definition; returns what the message stands for."""
    codes, scale, lowest = read(message, len(exact), format)
    low, high = extremes(exact, format.block)
    if format.symmetric:
        wanted = np.maximum(-low, high) / (2 ** (format.bits - 1) - 1)
    else:
        wanted = (high - low) / (2**format.bits - 1)
        np.testing.assert_array_equal(lowest, low)
    np.testing.assert_allclose(scale, wanted, rtol=4 * ROUNDING)
    stands_for = codes * scale + lowest
    largest = np.maximum(-low, high) + (high - low)
    assert (np.abs(exact - stands_for) <= scale / 2 + 2 * ROUNDING * largest).all()
    return stands_for


@each_format
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_error_is_half_a_scale_at_most(
    isa: str, generator: torch.Generator, format: BlockFormat, dtype: torch.dtype
) -> None:
    for count in COUNTS:
        decades = 10 ** (4 * torch.rand(-(-count // 256), generator=generator) - 3).repeat_interleave(256)
        values = (decades[:count] * (torch.randn(count, generator=generator) + 0.5)).to(dtype)
        message = quantize(values, format)
        stands_for = check_message(message, values.double().numpy(), format)
        back = dequantize(message, count, format)
        np.testing.assert_allclose(back.numpy(), stands_for, rtol=2 * ROUNDING, atol=1e-30)
        assert torch.equal(dequantize(message, count, format, dtype=dtype), back.to(dtype))


@each_format
@pytest.mark.parametrize("block", [128, 384, 4096])
def test_other_blocks(generator: torch.Generator, isa: str, format: BlockFormat, block: int) -> None:
    own = BlockFormat(format.bits, format.symmetric, block)
    values = torch.randn(2 * block + 77, generator=generator)
    message = quantize(values, own)
    stands_for = check_message(message, values.double().numpy(), own)
    np.testing.assert_allclose(
        dequantize(message, len(values), own).numpy(), stands_for, rtol=2 * ROUNDING, atol=1e-30
    )


@each_format
def test_halves_round_to_even(isa: str, format: BlockFormat) -> None:
    # A scale of one: every half between the lowest and the highest whole number.
    low, high = (
        (-(2 ** (format.bits - 1)) + 1, 2 ** (format.bits - 1) - 1)
        if format.symmetric
        else (0, 2**format.bits - 1)
    )
    values = torch.arange(2 * low, 2 * high + 1)[-500:] / 2
    for chosen in (values[-256:], values[:255]):
        chosen = torch.cat([chosen[:254], torch.tensor([low, high])])
        assert torch.equal(dequantize(quantize(chosen, format), len(chosen), format), chosen.round())


@each_format
def test_chunks_and_their_order(isa: str, generator: torch.Generator, format: BlockFormat) -> None:
    chunks, each, order = 4, 301, [2, 0, 3, 1]
    values = torch.randn(chunks * each, generator=generator)
    alone = [quantize(chunk.clone(), format) for chunk in values.view(chunks, each)]
    assert torch.equal(quantize(values, format, chunks), torch.cat(alone))
    assert torch.equal(quantize(values, format, chunks, order), torch.cat([alone[chunk] for chunk in order]))
    back = dequantize(torch.cat(alone), chunks * each, format, chunks).view(chunks, each)
    for chunk in range(chunks):
        assert torch.equal(back[chunk], dequantize(alone[chunk], each, format))


@each_format
@pytest.mark.parametrize("senders", [1, 2, 5])
def test_sums_in_the_order_of_messages(
    isa: str, generator: torch.Generator, format: BlockFormat, senders: int
) -> None:
    for count in (1, 300, 2048):
        sent = [quantize(torch.randn(count, generator=generator), format) for _ in range(senders)]
        total = dequantize(sent[0], count, format)
        for message in sent[1:]:
            total += dequantize(message, count, format)
        factor = 1 / 3
        out = torch.full((count,), float("nan"))
        ops.sum_quantized_(out, torch.cat(sent), format, factor, False)
        assert torch.equal(out, total * factor)
        old = torch.randn(count, generator=generator)
        out.copy_(old)
        ops.sum_quantized_(out, torch.cat(sent), format, factor, True)
        assert torch.equal(out, total * factor + old)


@each_format
@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f"to-int{f.bits}-{BITS[f.symmetric]}")
def test_requantizes_the_sum_of_each_chunk(
    isa: str, generator: torch.Generator, format: BlockFormat, to: BlockFormat
) -> None:
    for senders, chunks, each in ((1, 1, 5), (3, 2, 259), (2, 3, 1024), (4, 1, 21)):
        sent = torch.randn(senders, chunks * each, generator=generator)
        messages = torch.stack([quantize(values, format, chunks).view(chunks, -1) for values in sent])
        wanted = []
        for chunk in range(chunks):
            total = torch.empty(each)
            ops.sum_quantized_(total, messages[:, chunk].reshape(-1), format, 0.3, False)
            wanted.append(quantize(total, to))
        out = poisoned(chunks * to.payload_bytes(each))
        ops.requantize_(out, messages.view(-1), format, None if to == format else to, 0.3, chunks)
        assert torch.equal(out, torch.cat(wanted))


@each_format
def test_zero_and_constant_blocks_are_exact(
    isa: str, generator: torch.Generator, format: BlockFormat
) -> None:
    values = torch.randn(1100, generator=generator)
    values[256:512] = 0
    values[300:400] = -0.0
    values[512:768] = 0 if format.symmetric else -3.7
    values[1024:] = 0
    message = quantize(values, format)
    out = torch.full((1100,), float("nan"))
    ops.sum_quantized_(out, torch.cat([message, message]), format, 0.5, False)
    for begin, end in ((256, 512), (512, 768), (1024, 1100)):
        assert torch.equal(out[begin:end], values[begin:end])
    assert not torch.signbit(out[256:512]).any()


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_non_finite_value_is_seen_in_all_of_its_block(
    isa: str, generator: torch.Generator, format: BlockFormat, bad: float, dtype: torch.dtype
) -> None:
    for position in (256, 300, 511, 1027):
        values = torch.randn(1030, generator=generator).to(dtype)
        values[position] = bad
        message = quantize(values, format)
        again = poisoned(len(message))
        ops.requantize_(again, torch.cat([message, message]), format, None, 0.5, 1)
        wanted = torch.arange(1030) // 256 == position // 256
        for each in (message, again):
            back = dequantize(each, 1030, format)
            assert torch.equal(back.isnan(), wanted) and back[~wanted].isfinite().all()


@each_format
def test_the_smallest_and_the_largest_ranges(
    isa: str, generator: torch.Generator, format: BlockFormat
) -> None:
    tiny = 1e-38 * (torch.rand(256, generator=generator) + 1)
    back = dequantize(quantize(tiny, format), 256, format)
    assert torch.equal(back, torch.zeros(256) if format.symmetric else tiny.min().expand(256))
    small = torch.randn(256, generator=generator) * 1e-34
    check_message(quantize(small, format), small.double().numpy(), format)
    largest = torch.finfo(torch.float32).max
    values = torch.rand(256, generator=generator) * largest
    values[0] = largest
    check_message(quantize(values, format), values.double().numpy(), format)
    values[1] = -largest
    assert dequantize(quantize(values, format), 256, format).isnan().all() != format.symmetric


@each_format
def test_instruction_sets_and_threads_agree_bit_for_bit(
    generator: torch.Generator, format: BlockFormat
) -> None:
    chunks, each = 3, 40_003
    values = torch.randn(chunks * each, generator=generator)
    values[5 * 256 : 6 * 256] = 0
    values[77] = float("nan")

    def everything() -> list[Tensor]:
        results = []
        for dtype in FLOAT_DTYPES:
            messages = quantize(values.to(dtype), format, chunks)
            back = dequantize(messages, chunks * each, format, chunks, dtype)
            results += [messages, back.nan_to_num(nan=-1)]
        total = torch.ones(each)
        ops.sum_quantized_(total, messages, format, 0.3, True)
        again = poisoned(chunks * format.payload_bytes(each))
        ops.requantize_(again, torch.cat([messages, messages]), format, None, 0.5, chunks)
        return [*results, total.nan_to_num(nan=-1), again]

    assert_same_on_all_isas_and_threads(everything)


def test_formats() -> None:
    assert BlockFormat(4, True).payload_bytes(257) == 128 + 4 + 8
    assert BlockFormat(4, False).payload_bytes(1000) == 500 + 4 * 8
    assert BlockFormat(8, True).payload_bytes(1) == 8 + 4
    assert BlockFormat(8, False).payload_bytes(0) == 0
    with pytest.raises(ValueError, match="bits: expected 4 or 8, got 3"):
        BlockFormat(3, True)  # type: ignore[arg-type]
    for block in (0, 64, 200, 8192):
        with pytest.raises(
            ValueError, match=f"BlockFormat.block: expected a multiple of 128 .*, got {block}"
        ):
            BlockFormat(8, True, block)
    assert len(quantize(torch.empty(0), BlockFormat(8, True), 2)) == 0


def test_refuses_wrong_arguments_by_name(generator: torch.Generator) -> None:
    format = BlockFormat(8, False)
    values = torch.randn(90, generator=generator)
    messages = poisoned(3 * format.payload_bytes(30))
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((messages, values.double(), format, 3), "argument 'values': expected dtype .*, got Double"),
        ((messages.int(), values, format, 3), "argument 'payloads': expected dtype .*, got Int"),
        ((messages[:-4], values, format, 3), "argument 'payloads': .*got shape"),
        ((poisoned(len(messages) + 1)[1:], values, format, 3), "an address that is a multiple of 4"),
        ((messages, values, format, 4), "elements: expected a multiple of the 4 chunks, got 90"),
        ((messages, values, format, 3, [0, 1]), "order: expected each of the 3 chunks once, got 2 numbers"),
        ((messages, values, format, 3, [0, 1, 1]), "order: expected each of 0 to 2 once, got 1 twice"),
        ((messages, values, format, 3, [0, 1, 3]), "order: expected each of 0 to 2 once, got 3"),
        ((values.view(torch.uint8)[: len(messages)], values, format, 3), "expected its own memory"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=f"quantize_.*{message}"):
            ops.quantize_(*arguments)  # type: ignore[arg-type]
    assert torch.equal(messages, poisoned(len(messages)))
    out = poisoned(3 * format.payload_bytes(30))
    with pytest.raises(RuntimeError, match=r"out_format: expected blocks of .*, got 128"):
        ops.requantize_(out, messages, format, BlockFormat(8, False, 128), 1.0, 3)
    with pytest.raises(RuntimeError, match=r"'payloads_out': expected chunks .*, got 44"):
        ops.requantize_(poisoned(44), messages, format, None, 1.0, 1)
    with pytest.raises(RuntimeError, match="a multiple of the 3 chunks as the number of payloads, got 4"):
        ops.requantize_(out, torch.cat([messages, messages])[: 4 * 40], format, None, 1.0, 3)
    with pytest.raises(RuntimeError, match=r"sum_quantized_.*one or more payloads of 40 bytes"):
        ops.sum_quantized_(values[:30], messages[:44], format, 1.0, False)
    with pytest.raises(RuntimeError, match=r"factor: .*got inf"):
        ops.sum_quantized_(values[:30], messages[:40], format, float("inf"), False)
    with pytest.raises(RuntimeError, match=r"dequantize_.*'out': expected dtype .*, got Int"):
        ops.dequantize_(values.int(), messages, format, 3)
