"""The peers of the attention benchmark on devices: FlexAttention at its best, and never without compiling."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from benchmarks.gpu import attention
from benchmarks.gpu.attention import FLEX_BLOCKS, Shape, chosen_blocks, flex

CPU = torch.device("cpu")


@torch._dynamo.config.patch(recompile_limit=8)  # and what the benchmark sets ends with the test
def test_flex_attention_is_tuned_and_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than torch compiles by default; without C++ and without tuning here."""
    asked: list[dict[str, Any]] = []
    compiled = torch.compile

    def watched(function: Any, **options: Any) -> Any:
        asked.append(options)
        return compiled(function, backend="eager", fullgraph=options["fullgraph"], dynamic=options["dynamic"])

    make = functools.partial(torch_flex.create_block_mask, _compile=False)
    monkeypatch.setattr(torch, "compile", watched)
    monkeypatch.setattr(
        torch_flex, "create_block_mask", lambda *args, _compile, **options: make(*args, **options)
    )
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
        for block in FLEX_BLOCKS:
            call = flex(shape, mask, block, CPU)
            assert (block, block) == call.keywords["block_mask"].BLOCK_SIZE
            torch.testing.assert_close(call(*rows), wanted)
    assert len(asked) == 2 * len(shapes) > 8
    for options in asked:
        assert options == {"fullgraph": True, "dynamic": False, "mode": "max-autotune-no-cudagraphs"}
    assert FLEX_BLOCKS[0] == 128 and 2 * len(shapes) <= attention.FLEX_GRAPHS
