"""Costs of optimizer steps on full tensors: owners, operations and memory, for the engine and for plans."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

# Of an element on its way to the owner of its tensor and back, by the dtype of the iteration, `ns_dtype`.
DIRECTION_BYTES = {"bf16": 2, "fp32": 4}
DEFAULT_NS_DTYPE = "bf16"  # as torch.optim.Muon
# Matrix products take that many times as long as in bf16: of A100 and H100, in fp32 without TF32.
MATMUL_SLOWDOWN = {"bf16": 1, "fp32": 16}
NEWTON_SCHULZ_STEPS = 5  # by default, of torch.optim.Muon too
# Of a rank's shards, in a wave. Owners have as much to do on average, and a wave has to have several matrices
# for each of them: three blocks of a 7B model on 16 ranks.
WAVE_ELEMENTS = 1 << 25
WAVES_IN_FLIGHT = 3
BATCH_ELEMENTS = 1 << 24  # of matrices that an accelerator orthogonalizes together


def deal_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return an owner for each cost: from the largest down, the rank that has the least so far.

    The same on every rank that asks the same. The largest sum of a rank exceeds the mean by less than one
    cost (Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Args:
        costs: of each tensor.
        ranks: number of ranks.
    """
    owners = [0] * len(costs)
    # More ranks than tensors would have nothing to do.
    loads = [(0, rank) for rank in range(min(ranks, len(costs)))]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return owners


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Return the multiplications of one iteration on a matrix, or on each of a stack of matrices.

    For m rows and n columns, m the smaller, they are m²n for the Gram matrix, m³ for its square and m²n for
    the product of the polynomial with the matrix.

    Args:
        shape: of the matrix. Of four dimensions it is that of filters, which are rows of one matrix. Of other
            numbers the last two are those of a matrix.
    """
    rows, columns = matrix_sides(shape)
    return rows * (2 * columns + rows) * math.prod(shape) // max(columns, 1)


def newton_schulz_flops(shape: Sequence[int], steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the floating-point operations of orthogonalizing a matrix, as torch counts matrix products.

    Args:
        shape: as for :func:`newton_schulz_cost`.
        steps: iterations.
    """
    return 2 * steps * newton_schulz_cost(shape)


def wave_elements(shards: Sequence[int]) -> int:
    """Return the elements of a wave of ``shards`` that are stepped together, at most."""
    return min(sum(shards), max([WAVE_ELEMENTS, *shards]))


def full_tensor_step_bytes(
    shards: Sequence[int], ranks: int, largest: Sequence[int], direction_bytes: int
) -> int:
    """Return the bytes of memory that a step on full matrices takes on a rank while it runs, at most.

    The waves in flight, one that has just landed among them, have the directions of the rank's shards, the
    copies that it sends, which results come back to, and what it receives of the matrices that it owns. One
    wave has its full matrices and their results. One batch has copies of the matrices, what they were divided
    by their norms to, two iterates and two Gram matrices.

    Args:
        shards: elements of the shards that are stepped together.
        ranks: ranks that share a matrix. With one, nothing is sent.
        largest: shape of the largest matrix, or stack of matrices.
        direction_bytes: of an element, a value of ``DIRECTION_BYTES``.
    """
    if not any(shards) or not math.prod(largest):
        return 0
    rows, columns = matrix_sides(largest)
    wave = wave_elements(shards)
    flying = min(sum(shards), (WAVES_IN_FLIGHT + 1) * wave)
    batch = max(min(wave, BATCH_ELEMENTS), math.prod(largest))
    elements = flying + wave + 4 * batch + 2 * batch * rows // columns
    if ranks > 1:
        elements += flying + (flying + wave) * (ranks - 1) // ranks + math.prod(largest)
    return direction_bytes * elements


def matrix_sides(shape: Sequence[int]) -> list[int]:
    """Return the sides of a matrix, or of each of a stack, the shorter one first."""
    return sorted((shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape[-2:])
