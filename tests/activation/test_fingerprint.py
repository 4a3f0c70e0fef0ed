"""Different tensors have different numbers, on the host and as an accelerator computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.activation.blocks import fresh_seed
from zero_ext.activation.packed_layout import PackedLayout
from zero_ext.activation.partitioned_activations import Fingerprint, checksum, sums

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int8, torch.complex64]


def by_sums(tensors: list[torch.Tensor]) -> int:
    spans = PackedLayout.of(tensors).spans
    pairs = zip(spans, tensors, strict=True)
    return hash(tuple(int(sums(span.memory_of(each), each.element_size())) for span, each in pairs))


def by_fingerprint(tensors: list[torch.Tensor]) -> int:
    found = Fingerprint(torch.device("cpu"))
    found.add(tensors)
    return int(found.value())


def what_sums_see(flat: torch.Tensor) -> tuple[object, ...]:
    """The sums of ``flat``'s rows of 1024 and of their columns, and what fills no row, as exact integers."""
    words = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.int64}[flat.element_size()]
    memory = np.frombuffer(bytes(flat.view(torch.uint8).tolist()), words)
    rows, rest = np.split(memory, [len(memory) // 1024 * 1024])
    table = rows.reshape(-1, 1024).astype(object)
    return tuple(table.sum(0)), tuple(table.sum(1)), tuple(rest.tolist())


@pytest.mark.parametrize("number_of", [checksum, by_sums, by_fingerprint])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 1024), (50, 100), (64, 1024)])
def test_what_differs(
    number_of: Callable[[list[torch.Tensor]], int], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(fresh_seed())
    values = (torch.rand(shape) * 200 - 100).to(dtype) if dtype != torch.bool else torch.rand(shape) > 0.5
    flat = values.flatten()
    flat[:2] = torch.tensor([0, 1])
    changed, swapped = flat.clone(), flat.clone()
    position, other = (int(flat.ne(flat[0]).nonzero()[0]), 0)
    changed[position] = flat[other]
    swapped[position], swapped[other] = flat[other], flat[position]
    different = [flat, changed, swapped, flat.flip(0), flat.roll(1), flat.roll(1024 % len(flat))]
    different += [flat.view(torch.uint8).bitwise_xor(1).view(dtype)] if dtype != torch.bool else [~flat]
    seen = what_sums_see if number_of is by_sums else lambda each: tuple(each.view(torch.uint8).tolist())
    assert len({number_of([each]) for each in different}) == len({seen(each) for each in different})
    assert number_of([flat.clone()]) == number_of([flat])
    assert number_of([values]) == number_of([values.clone()])


def test_order_and_number_of_what_is_added() -> None:
    torch.manual_seed(fresh_seed())
    first, second = torch.randn(2, 64, 64)
    added: list[list[list[torch.Tensor]]] = [
        [],
        [[]],
        [[first]],
        [[first], []],
        [[first], [second]],
        [[second], [first]],
        [[first, second]],
        [[first], [first]],
    ]
    found = []
    for calls in added:
        fingerprint = Fingerprint(torch.device("cpu"))
        for tensors in calls:
            fingerprint.add(tensors)
        found.append(int(fingerprint.value()))
    assert len(set(found)) == len(found)
