"""Bytes of model state per rank by ZeRO's formula (Rajbhandari et al. 2020, section 5), for Adam."""

STATE_KINDS = ("params", "grads", "optimizer")
BYTES_PER_ELEMENT = {"params": 2, "grads": 2, "optimizer": 12}
SHARDED_FROM_STAGE = {"params": 3, "grads": 2, "optimizer": 1}


def state_bytes(parameters: int, stage: int, ranks: int) -> dict[str, float]:
    """Bytes one rank holds of each state kind: bfloat16 params and grads, float32 master and two moments.

    Sums to 16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N for stages 0 to 3. ValueError for another stage or no ranks.
    """
    if stage not in range(4) or ranks < 1:
        raise ValueError(f"stage 0 to 3 and at least one rank expected, got stage {stage}, {ranks} ranks")
    return {
        kind: BYTES_PER_ELEMENT[kind] * parameters / (ranks if stage >= SHARDED_FROM_STAGE[kind] else 1)
        for kind in STATE_KINDS
    }


def relative_excess(measured: float, formula: float) -> float:
    """(measured - formula) / formula."""
    return (measured - formula) / formula
