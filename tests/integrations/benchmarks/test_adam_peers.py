"""The benchmark of Adam's step beside optimizers of other packages."""

from __future__ import annotations

import pytest

from benchmarks import adam


def test_8bit_adam_against_bitsandbytes() -> None:
    """Both move the weights as float32 moments do, and are compared with one another."""
    found = adam.contenders(10_240, False, True)
    adam.run_in_turn(found, 3)
    assert adam.check_agreement(found) <= adam.AGREEMENT
    _, rows = adam.judge(found, 3)
    by_name = {row["name"]: row for row in rows}
    own, peer = by_name["zero_ext, 8-bit moments"], by_name["bitsandbytes, AdamW8bit"]
    assert own["zero_ext_faster_by"] == 1.0 and own["bytes"] < by_name["zero_ext, bfloat16 moments"]["bytes"]
    ratios = [theirs / mine for theirs, mine in zip(peer["rounds"], own["rounds"], strict=True)]
    assert peer["zero_ext_faster_by"] == sorted(ratios)[1]
    idle = next(each for each in found if each.eight_bit)
    assert idle.master is not None
    idle.master.copy_(adam.weights(10_240))
    with pytest.raises(RuntimeError, match=r"8-bit moments: expected updates within 0.1 "):
        adam.check_agreement(found)
