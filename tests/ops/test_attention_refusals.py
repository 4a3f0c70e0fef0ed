"""Calls of block-sparse attention that are refused, by the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import get_type_hints

from tests.ops.attention_reference import Case, compressed
from zero_ext import ops


@pytest.fixture
def case(generator: torch.Generator) -> Case:
    rows = [torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, 2, 2)]
    return Case(*rows, torch.ones(4, 3, 3, dtype=torch.bool), 16)


def refused(case: Case, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        case.run()


# What is changed in a call that is allowed, and words of the message.
CHANGES: list[tuple[Callable[[Case], dict[str, Any]], str]] = [
    (lambda case: {"key": case.key.half()}, "'key': expected dtype Float as of query, got Half"),
    (lambda case: {"query": case.query.double()}, "'query': expected dtype .*, got Double"),
    (lambda case: {"query": case.query[0]}, r"'query': expected shape .*got \[4, 40, 16\]"),
    (lambda case: {"query": torch.tensor(1.0)}, r"'query': expected shape .*got \[\]"),
    (lambda case: {"query": case.query.to("meta")}, "expected all tensors on one device, got cpu, meta"),
    (lambda case: {"value": case.value[:, :, 1:]}, r"'value': expected key's .*got \[2, 2, 39, 16\]"),
    (lambda case: {"key": case.key[:1], "value": case.value[:1]}, "'key': expected batch and head dim of"),
    (lambda case: dict.fromkeys(("key", "value"), torch.randn(2, 3, 40, 16)), "divides query's 4, got 3"),
    (lambda case: {"block": 24}, "block: expected 16, 32, 64 or 128, got 24"),
    (lambda case: {"scale": float("inf")}, "scale: .*finite.*got inf"),
    (lambda case: {"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1"),
    (lambda case: {"dropout": -0.1}, "dropout: .*got -0.1"),
    (lambda case: {"offset": 2**32}, r"offset: expected at least 0 and below 2\^32, got 4294967296"),
    (lambda case: {"key_padding": torch.ones(2, 40)}, "'key_padding': expected dtype Bool.*got Float"),
    (lambda case: {"key_padding": torch.ones(2, 39).bool()}, r"'key_padding': .*\[2, 40\].*got \[2, 39\]"),
    (lambda case: {"key_padding": torch.tensor(True)}, r"'key_padding': .*\[2, 40\].*got \[\]"),
    (lambda case: {"bias": torch.zeros(1, 4, 40, 39)}, r"'bias': .*\[2 or 1.*got \[1, 4, 40, 39\]"),
    (lambda case: {"bias": torch.zeros(40, 40)}, r"'bias': expected shape .*got \[40, 40\]"),
    (lambda case: {"bias": torch.zeros(1, 1, 40, 40).int()}, "'bias': expected dtype Float.*got Int"),
    (lambda case: {"mask": case.mask[:, :2]}, r"'row_pointers': .*4 query heads, 40 queries.*got \[4, 3\]"),
    (lambda case: {"mask": case.mask[:2]}, r"shape \[1 or 4, 4\].*Build the layout for this length"),
    (lambda case: {"mask": torch.ones(4, 3, 4).bool()}, "'columns': .*below 3, .*, got 3 at 3, in row"),
    *(
        (
            lambda case, dim=dim: dict.fromkeys(("query", "key", "value"), torch.randn(2, 4, 40, dim)),
            f"head dim: expected a multiple of 8 from 16 to 256, got {dim}",
        )
        for dim in (0, 8, 20, 264)
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_arguments(case: Case, change: Callable[[Case], dict[str, Any]], message: str) -> None:
    refused(replace(case, **change(case)), message)


def test_unknown_options(case: Case) -> None:
    rows = (case.query, case.key, case.value)
    with pytest.raises(TypeError, match=r"expected keywords among .*, got 'drop'"):
        ops.block_sparse_attention(*rows, *compressed(case.mask), block=16, drop=0.1)  # type: ignore[call-arg]


def test_every_argument_has_a_type() -> None:
    hints = get_type_hints(ops.block_sparse_attention)
    assert Any not in hints.values()
    assert get_args(hints["options"]) == (ops.AttentionOptions,)
    options = get_type_hints(ops.AttentionOptions)
    assert options["key_padding"] == options["bias"] == Tensor | None
    assert options["dropout"] is float


def pointers(layout: ops.LayoutTensors, position: tuple[int, int], value: int) -> ops.LayoutTensors:
    changed = layout.row_pointers.clone()
    changed[position] = value
    return layout._replace(row_pointers=changed)


def columns(layout: ops.LayoutTensors, position: int, value: int) -> ops.LayoutTensors:
    changed = layout.columns.clone()
    changed[position] = value
    return layout._replace(columns=changed)


HOSTILE: list[tuple[Callable[[ops.LayoutTensors], Any], str]] = [
    (lambda good: pointers(good, (0, 0), -1), r"'row_pointers': .*got -1 at \[0, 0\]"),
    (lambda good: pointers(good, (3, 3), 1000), "'row_pointers': .*got 33 at .* and 1000 after it"),
    (lambda good: pointers(good, (1, 2), 3), "'row_pointers': .*ascend.*got 12 at .* and 3 after it"),
    (lambda good: columns(good, 2, 3), r"'columns': .*got 3 at 2, in row \[0, 0\]"),
    (lambda good: columns(good, 0, -2), "'columns': .*got -2 at 0"),
    (lambda good: columns(good, 4, 0), "'columns': .*ascend.*got 0 at 4, in row"),
    (lambda good: good._replace(columns=good.columns.long()), "'columns': expected dtype Int, got Long"),
    (
        lambda good: good._replace(row_pointers=good.row_pointers[:, ::2]),
        "'row_pointers': expected a contiguous tensor",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), HOSTILE)
def test_layouts_with_impossible_values(
    case: Case, spoil: Callable[[ops.LayoutTensors], ops.LayoutTensors], message: str
) -> None:
    layout = spoil(compressed(case.mask))
    with pytest.raises(RuntimeError, match=message):
        ops.block_sparse_attention(case.query, case.key, case.value, *layout, block=16)


def test_backward_checks_its_arguments(case: Case) -> None:
    arguments = case.forward_arguments()
    output, logsumexp = torch.ops.zero_ext.block_sparse_attention_forward(*arguments)

    def backward(grad: Tensor, result: Tensor, sums: Tensor, wants: bool = False) -> None:
        rows = (grad, *arguments[:3], result, sums, *arguments[3:])
        torch.ops.zero_ext.block_sparse_attention_backward(*rows, wants)

    for arguments_of_call, message in (
        ((output[:, :2], output, logsumexp), "'grad_output': expected query's shape"),
        ((output.half(), output, logsumexp), "'grad_output': expected dtype Float as of query, got Half"),
        ((output, output[:, :2], logsumexp), "'output': expected query's shape"),
        ((output, output, logsumexp[:1]), r"'logsumexp': expected shape \[2, 4, 40\], got \[1, 4, 40\]"),
        ((output, output, logsumexp.double()), "'logsumexp': expected dtype Float, got Double"),
        ((output, output, logsumexp, True), "'bias': .*its gradient is needed, got None"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backward(*arguments_of_call)
    backward(output, output, logsumexp)


NO_DERIVATIVE = "block_sparse_attention: it has no forward-mode derivative .* none by torch.func"


@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_is_refused(case: Case, name: str, trained: bool) -> None:
    case = replace(case, bias=torch.zeros(1, 1, 1, 40))
    tensor = getattr(case, name).requires_grad_(trained)
    with forward_ad.dual_level():
        refused(replace(case, **{name: forward_ad.make_dual(tensor, torch.ones_like(tensor))}), NO_DERIVATIVE)
        case.run()  # without a tangent it is no matter


def derivatives(function: Callable[[Tensor], Tensor], point: Tensor) -> dict[str, Callable[[], Any]]:
    """Every transform of torch.func that differentiates, alone and within another."""
    func = torch.func
    one = torch.tensor(1.0)
    return {
        "jvp": lambda: func.jvp(function, (point,), (point,)),
        "jacfwd": lambda: func.jacfwd(function)(point),
        "grad": lambda: func.grad(function)(point),
        "vjp": lambda: func.vjp(function, point),
        "hessian": lambda: func.hessian(function)(point),
        "vmap of grad": lambda: func.vmap(func.grad(function))(point[None]),
        "jvp around a grad in something else": lambda: func.jvp(
            lambda outer: func.grad(lambda inner: inner * function(outer))(one), (point,), (point,)
        ),
        "compiled jvp": lambda: torch.compile(lambda x: func.jvp(function, (x,), (x,))[1], backend="eager")(
            point
        ),
    }


@pytest.mark.parametrize("name", derivatives(torch.sum, torch.ones(1)))
def test_derivatives_of_torch_func_are_refused(case: Case, name: str) -> None:
    def function(query: Tensor) -> Tensor:
        return replace(case, query=query).run().sum()

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        derivatives(function, case.query)[name]()


def test_vmap_is_a_loop(case: Case) -> None:
    queries = torch.stack([case.query, 2 * case.query])
    found = torch.func.vmap(lambda query: replace(case, query=query).run())(queries)
    for one, query in zip(found, queries, strict=True):
        assert torch.equal(one, replace(case, query=query).run())
