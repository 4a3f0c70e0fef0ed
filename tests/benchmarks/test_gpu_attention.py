"""The peers of the attention benchmark on devices: FlexAttention at its best, and never without compiling."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import FLEX_VARIANTS, Shape, chosen_blocks, flex

CPU = torch.device("cpu")


@torch._dynamo.config.patch(recompile_limit=8)  # and what the benchmark sets ends with the test
def test_flex_attention_is_tuned_and_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than torch compiles by default; without C++ and without tuning here."""
    asked: list[dict[str, Any]] = []
    compiled = torch.compile

    def watched(function: Any, **options: Any) -> Any:
        asked.append(options)
        return compiled(function, backend="eager", fullgraph=options["fullgraph"], dynamic=options["dynamic"])

    monkeypatch.setattr(torch, "compile", watched)
    torch._dynamo.reset()
    shapes = [
        Shape(1, 1, tokens, dim, causal)
        for tokens in (128, 256, 384)
        for dim in (16, 32)
        for causal in (False, True)
    ]
    for shape in shapes:
        mask = chosen_blocks(shape.tokens // shape.block, shape.causal, random.Random(0))
        rows = [torch.randn(1, 1, shape.tokens, shape.dim) for _ in range(3)]
        dense = mask.repeat_interleave(shape.block, 0).repeat_interleave(shape.block, 1)
        dense = dense.tril() if shape.causal else dense
        wanted = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=dense)
        for block, mode in FLEX_VARIANTS:
            call = flex(shape, mask, block, mode, CPU)
            assert (block, block) == call.keywords["block_mask"].BLOCK_SIZE
            torch.testing.assert_close(call(*rows), wanted)
    modes = [mode for _ in shapes for _, mode in FLEX_VARIANTS]
    assert asked == [{"fullgraph": True, "dynamic": False, "mode": mode} for mode in modes]
    assert "max-autotune-no-cudagraphs" in modes and 8 < len(modes) <= attention.FLEX_GRAPHS
