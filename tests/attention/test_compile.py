"""SparseSelfAttention under torch.compile: one graph once a layout is there, a break where it is built."""

from __future__ import annotations

import torch

from zero_ext.attention import SparseSelfAttention

CONFIG = {"mode": "fixed", "block": 16, "num_local_blocks": 2, "attention": "unidirectional"}


def inputs(length: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]


def gradients(attention: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = attention(*tensors)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), tensors)]


def test_one_graph_for_a_length_seen_before() -> None:
    torch._dynamo.reset()
    attention = SparseSelfAttention(CONFIG)
    tensors = inputs(70)
    wanted = gradients(attention, tensors)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for found, right in zip(gradients(compiled, tensors), wanted, strict=True):
        assert torch.equal(found, right)


def test_a_new_length_builds_its_layout_outside_the_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(SparseSelfAttention(CONFIG), backend="aot_eager")
    for length in (70, 90, 70):
        tensors = inputs(length)
        wanted = gradients(SparseSelfAttention(CONFIG), tensors)
        for found, right in zip(gradients(compiled, tensors), wanted, strict=True):
            assert torch.equal(found, right)
