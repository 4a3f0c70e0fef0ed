"""Every kernel once or twice on small and odd sizes, checked against the CPU's: for compute-sanitizer.

python -m tests.gpu.exercise [--device cuda] [--family adam]
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_ext import ops

SIZES = (1, 7, 255, 4099, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of Adam's master weights only, whose `pow` is the device's own: part of a value, and absolute.
MASTER_TOLERANCE = 2e-6
# Of attention, by the dtype that its weights and results are rounded to.
ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
LONGEST_ATTENTION = 300


class Pair(NamedTuple):
    """What the device has and what it should have, and by how much the two may differ."""

    found: Tensor
    wanted: Tensor
    tolerance: float = 0.0

    def differs(self) -> bool:
        """Whether they do by more."""
        found = self.found.cpu()
        if self.tolerance:
            return not torch.allclose(found, self.wanted, rtol=self.tolerance, atol=self.tolerance)
        return not torch.equal(found, self.wanted)


def moved(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the device."""
    return [tensor.to(device, copy=True) for tensor in tensors]


def adam(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """What an update writes; the parameters are the device's own master weights, cast."""
    pairs = []
    for dtype in DTYPES:
        state = [torch.randn(count, generator=generator) for _ in range(3)]
        state[2].square_()
        grad = torch.randn(count, generator=generator).to(dtype)
        param = torch.zeros(count, dtype=dtype)
        row = [[1e-3, 0.9, 0.999, 1e-8, 0.1, 2.0, 1.0, 0.0]]
        rest = [torch.tensor([[0, count]]), torch.tensor(row, dtype=torch.float64), torch.tensor(0.5)]
        on_device = moved(device, [*state, grad, param, *rest])
        ops.adam_step_(*on_device)
        ops.adam_step_(*state, grad, param, *rest)
        pairs.append(Pair(on_device[0], state[0], MASTER_TOLERANCE))
        pairs += [Pair(*each) for each in zip(on_device[1:3], state[1:], strict=True)]
        pairs.append(Pair(on_device[4], on_device[0].cpu().to(dtype)))
    return pairs


def lion(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same of Lion."""
    state = [torch.randn(count, generator=generator) for _ in range(2)]
    grad, param = torch.randn(count, generator=generator).bfloat16(), torch.zeros(count).bfloat16()
    row = torch.tensor([[1e-3, 0.9, 0.99, 0.1, 0.0]], dtype=torch.float64)
    rest = [torch.tensor([[0, count]]), row, torch.tensor(0.5)]
    on_device = moved(device, [*state, grad, param, *rest])
    ops.lion_step_(*on_device)
    ops.lion_step_(*state, grad, param, *rest)
    return [Pair(*each) for each in zip([*on_device[:2], on_device[3]], [*state, param], strict=True)]


def lamb(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same of LAMB, with its norms."""
    state = [torch.randn(count, generator=generator) for _ in range(3)]
    state[2].square_()
    grad, param = torch.randn(count, generator=generator).bfloat16(), torch.zeros(count).bfloat16()
    row = torch.tensor([[1e-3, 0.9, 0.99, 1e-6, 0.1, 0.5, 0.5, 0.0, 0.0, 1.5]], dtype=torch.float64)
    rest = [torch.tensor([[0, count]]), row, torch.tensor(0.5)]
    norms = torch.zeros(1, 2, 33, dtype=torch.int64)
    results = []
    for where in (device, torch.device("cpu")):
        *buffers, out, sums = moved(where, [*state, grad, param, norms])
        hyper = moved(where, rest)
        ops.lamb_norms_(*buffers, *hyper, sums)
        ops.lamb_step_(*buffers, out, *hyper)
        results.append([*buffers[:3], out, sums])
    return [Pair(*each) for each in zip(*results, strict=True)]


def eight_bit(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same for quantizing, an update of what was quantized, and reading back."""
    values = torch.randn(count, generator=generator)
    row = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.1, 2.0, 1.0, 0.0]], dtype=torch.float64)
    rest = [torch.tensor([[0, count]]), row, torch.tensor(0.5)]
    results = []
    for where in (device, torch.device("cpu")):
        start = values.to(where, copy=True)
        first, second = ops.quantize_blockwise(start, True), ops.quantize_blockwise(start.abs(), False)
        ops.adam_step_8bit_(start, first, second, start.bfloat16(), None, *moved(where, rest))
        back = (ops.dequantize_blockwise(first, True), ops.dequantize_blockwise(second, False))
        results.append([start, *first, *second, *back])
    pairs = [Pair(*each) for each in zip(*results, strict=True)]
    return [pairs[0]._replace(tolerance=MASTER_TOLERANCE), *pairs[1:]]


def flat(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same for packing, sums and the norm."""
    tensors = [torch.randn(count, generator=generator) for _ in range(3)]
    offsets = [0, count + 3, 2 * count + 4]
    pairs = []
    for dtype in DTYPES:
        buffer = torch.zeros(3 * count + 9, dtype=dtype)
        on_device, chunks = buffer.to(device, copy=True), moved(device, tensors)
        out, sums = torch.zeros(count, dtype=dtype), torch.zeros(33, dtype=torch.int64)
        device_out, device_sums = moved(device, [out, sums])
        for where, inputs, total, squares in (
            (on_device, chunks, device_out, device_sums),
            (buffer, tensors, out, sums),
        ):
            ops.pack_(where, inputs, offsets)
            ops.accumulate_(where, inputs, offsets)
            ops.unpack_(where, inputs, offsets)
            ops.sum_shards_(total, inputs, 0.5, True)
            ops.squared_norm_(where, squares)
        values = (ops.squared_norm_value(device_sums), ops.squared_norm_value(sums))
        pairs += [
            Pair(*each) for each in ((on_device, buffer), (device_out, out), (device_sums, sums), values)
        ]
    return pairs


def onebit(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same for 1-bit compression: compressed, decompressed, summed, and summed and compressed again."""
    chunks, payload_bytes = 3, ops.sign_payload_bytes(count)
    pairs = []
    for dtype in DTYPES:
        values = torch.randn(chunks * count, generator=generator).to(dtype)
        buffer = torch.zeros((chunks + 1) * payload_bytes, dtype=torch.uint8)
        state = [buffer, torch.zeros(chunks * count), torch.zeros(count), values]
        on_device = moved(device, state)
        for bytes_of, errors, error, of in (on_device, state):
            messages, reduced = bytes_of[: chunks * payload_bytes], bytes_of[chunks * payload_bytes :]
            ops.compress_1bit_(messages, errors, of, 0.5, chunks)
            ops.decompress_1bit_(of, messages, 2.0, True, chunks)
            ops.reduce_1bit_(reduced, error, messages, 1 / chunks)
            ops.sum_1bit_(error, messages, 1 / chunks, True)
        pairs += [Pair(*each) for each in zip(on_device, state, strict=True)]
    return pairs


def integers(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same for blocks of integers."""
    pairs = []
    for dtype in DTYPES:
        for bits, symmetric in ((4, True), (8, False)):
            form = ops.BlockFormat(bits, symmetric)
            payload_bytes = form.payload_bytes(count)
            values = torch.randn(4 * count, generator=generator).to(dtype)
            state = [torch.zeros(6 * payload_bytes, dtype=torch.uint8), torch.zeros(count), values]
            on_device = moved(device, state)
            for bytes_of, total, of in (on_device, state):
                messages, again = bytes_of[: 4 * payload_bytes], bytes_of[4 * payload_bytes :]
                ops.quantize_(messages, of, form, 4, [3, 1, 0, 2])
                ops.dequantize_(of, messages, form, 4)
                ops.sum_quantized_(total, messages, form, 0.25, True)
                ops.requantize_(again, messages, form, form, 0.5, 2)
            pairs += [Pair(*each) for each in zip(on_device, state, strict=True)]
    return pairs


def attention(device: torch.device, count: int, generator: torch.Generator) -> list[Pair]:
    """The same for block-sparse attention, whose sums the CPU makes in another order."""
    length, pairs = min(count, LONGEST_ATTENTION), []
    for dtype, block, dim in zip(DTYPES, (16, 32, 64), (64, 128, 256), strict=True):
        blocks = -(-length // block)
        mask = torch.rand(blocks, blocks, generator=generator) < 0.5
        layout = []
        for each in (mask, mask.t()):
            ends = each.sum(1).cumsum(0)
            layout += [torch.cat([ends.new_zeros(1), ends])[None].int(), each.nonzero()[:, 1].int()]
        rows = [torch.randn(1, 2, length, dim, generator=generator).to(dtype) for _ in range(4)]
        bias = torch.randn(1, 2, 1, length, generator=generator).to(dtype)
        results = []
        for where in (device, torch.device("cpu")):
            query, key, value, grad, shared = moved(where, [*rows, bias])
            leaves = [each.requires_grad_() for each in (query, key[:, :1], value[:, :1], shared)]
            output = ops.block_sparse_attention(
                *leaves[:3], *moved(where, layout), block=block, causal=True, bias=leaves[3], dropout=0.2
            )
            results.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
        tolerance = ATTENTION_TOLERANCE[dtype]
        pairs += [Pair(one.float(), two.float(), tolerance) for one, two in zip(*results, strict=True)]
    return pairs


FAMILIES = {
    family.__name__: family for family in (adam, lion, lamb, eight_bit, flat, onebit, integers, attention)
}


def main() -> int:
    """Exit status 1 if anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--family", choices=FAMILIES, help="one of the families alone")
    options = parser.parse_args()
    device, names = options.device, [options.family] if options.family else list(FAMILIES)
    seed = secrets.randbits(32)
    generator = torch.Generator().manual_seed(seed)
    compared, different = 0, 0
    for count in SIZES:
        for name in names:
            for pair in FAMILIES[name](device, count, generator):
                compared += 1
                if pair.differs():
                    different += 1
                    print(f"{name} on {count} elements differs, seed {seed}", file=sys.stderr)
    print(f"{compared} results compared with the CPU's, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
