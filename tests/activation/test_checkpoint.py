"""Gradients of checkpointed calls are those without checkpointing, bit for bit; what cannot be is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zero_ext
from tests.activation.blocks import WIDTH, Block, Stack, fresh_seed, gradients, same
from tests.activation.policies import POLICIES, made
from zero_ext.activation import (
    ActivationCheckpointing,
    BufferFullError,
    RandomStreams,
    checkpoint_activations,
    current_checkpointing,
)
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.config.events import ActivationEnd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    seed = fresh_seed()
    torch.manual_seed(seed)
    model = Stack().to(dtype)
    checkpointing = made(name, tmp_path)
    for step in range(3):
        wanted = gradients(model, None, seed + step)
        assert same(gradients(model, checkpointing, seed + step), wanted)
    gc.collect()
    assert checkpointing.used_bytes() == 0


def test_square_inputs_keep_their_strides(tmp_path: Path) -> None:
    seed = fresh_seed()
    model = Stack()
    for name in ("host", "nvme", "contiguous"):
        wanted = gradients(model, None, seed, (WIDTH, WIDTH))
        assert same(gradients(model, made(name, tmp_path), seed, (WIDTH, WIDTH)), wanted)


class Nested(nn.Module):
    """A stack whose blocks are checkpointed in pairs, inside which each is checkpointed again."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, hidden: torch.Tensor, run: Callable[..., Any] | None) -> torch.Tensor:
        for first, second in self.pairs:

            def both(x: torch.Tensor, first: nn.Module = first, second: nn.Module = second) -> torch.Tensor:
                if run is None:
                    return second(first(x))
                return checkpoint_activations(second, checkpoint_activations(first, x))

            hidden = both(hidden) if run is None else run(both, hidden)
        return hidden


def test_nested_calls_keep_the_outer_inputs_only(tmp_path: Path) -> None:
    seed = fresh_seed()
    model = Nested()
    for name in ("recompute", "host", "nvme", "saved tensors, host"):
        checkpointing = made(name, tmp_path)
        wanted = gradients(model, None, seed)
        with checkpointing:
            assert same(gradients(model, checkpointing, seed), wanted)
    checkpointing = made("host", tmp_path)
    torch.manual_seed(seed)
    output = model(torch.randn(64, WIDTH, requires_grad=True), checkpointing)
    assert checkpointing.used_bytes() == 2 * 64 * WIDTH * 4
    del output


def test_inside_and_around_checkpoints_of_torch(tmp_path: Path) -> None:
    seed = fresh_seed()
    model = Stack(2)
    wanted = gradients(model, None, seed)
    checkpointing = made("host", tmp_path)

    def inside(block: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return torch_checkpoint(lambda x: checkpointing(block, x, **kwargs), hidden, use_reentrant=False)

    def around(block: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return checkpointing(lambda x: torch_checkpoint(block, x, use_reentrant=False, **kwargs), hidden)

    assert same(gradients(model, inside, seed), wanted)
    assert same(gradients(model, around, seed), wanted)


def test_backward_twice_and_gradients_of_gradients(tmp_path: Path) -> None:
    torch.manual_seed(fresh_seed())
    block, inputs = Block(dropout=0.0), torch.randn(8, WIDTH, requires_grad=True)

    def slopes(run: Callable[..., Any] | None) -> list[torch.Tensor]:
        out = block(inputs).tanh().sum() if run is None else run(block, inputs).tanh().sum()
        (first,) = torch.autograd.grad(out, inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), inputs, retain_graph=True)
        (again,) = torch.autograd.grad(out, inputs)
        return [first.detach(), second, again]

    wanted = slopes(None)
    for name in ("recompute", "host", "nvme", "contiguous", "saved tensors, host"):
        assert same(slopes(made(name, tmp_path)), wanted), name


def test_without_autograd_it_is_a_plain_call() -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host"))
    block, inputs = Block(dropout=0.0), torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(checkpointing(block, inputs), block(inputs))
        assert checkpointing(lambda x: None, inputs.add_(1)) is None
    with torch.inference_mode():
        assert torch.equal(checkpointing(block, inputs), block(inputs))
    assert checkpointing.allocated_bytes() == {"device": 0, "host": 0, "nvme": 0}


def test_autocast_is_what_it_was(tmp_path: Path) -> None:
    seed = fresh_seed()
    model, checkpointing = Stack(2), made("host", tmp_path)

    def cast(run: Callable[..., Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        features = torch.randn(8, WIDTH, requires_grad=True)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(features, run).float().square().mean()
        loss.backward()  # outside: only the recomputation itself may be in bfloat16
        return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    assert same(cast(checkpointing), cast(None))


def test_named_streams_of_random_numbers_are_seen_again(tmp_path: Path) -> None:
    seed = fresh_seed()
    streams = RandomStreams("cpu")
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="host"), streams=streams)
    block = Block()

    def forked(x: torch.Tensor) -> torch.Tensor:
        with streams.fork():
            return block(x)

    found = []
    for run in (None, checkpointing):
        streams.seed_model_parallel(seed, 1)
        inputs = torch.randn(8, WIDTH, requires_grad=True)
        block.zero_grad()
        out = forked(forked(inputs)) if run is None else run(forked, run(forked, inputs))
        with streams.fork():
            out = out * torch.rand(8, WIDTH)  # the stream goes on where forward left it
        out.square().sum().backward()
        with streams.fork():
            after = torch.rand(3)
        found.append([inputs.grad, after, torch.rand(3), *(each.grad.clone() for each in block.parameters())])
    assert same(*found)


def test_abandoned_forwards_leave_nothing(tmp_path: Path) -> None:
    """Their extents are used again, also while they are still being written."""
    seed, model = fresh_seed(), Stack(3)
    wanted = gradients(model, None, seed)
    for name in ("host", "nvme", "saved tensors, nvme"):
        checkpointing, held = made(name, tmp_path), []
        for _ in range(5):
            abandoned = model(torch.randn(24, WIDTH, requires_grad=True), checkpointing)
            assert checkpointing.used_bytes() > 0
            del abandoned
            gc.collect()
            assert checkpointing.used_bytes() == 0
            assert same(gradients(model, checkpointing, seed), wanted)
            held.append(checkpointing.allocated_bytes())
        assert held == held[:1] * 5


def test_an_exception_in_backward_is_followed_by_a_good_step(tmp_path: Path) -> None:
    seed, model = fresh_seed(), Stack(3)
    wanted = gradients(model, None, seed)

    def fails(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("mine")

    for name in POLICIES:
        checkpointing = made(name, tmp_path)

        def run(
            block: nn.Module, hidden: torch.Tensor, checkpointing: Any = checkpointing, **more: Any
        ) -> Any:
            out = checkpointing(block, hidden, **more)
            if block is model.blocks[1]:
                out.register_hook(fails)
            return out

        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="mine"):
                gradients(model, run, seed)
            gc.collect()
            assert checkpointing.used_bytes() == 0
            assert same(gradients(model, checkpointing, seed), wanted), name


def test_a_value_that_changes_after_the_call(tmp_path: Path) -> None:
    """What was moved is a copy. What stays is refused, as autograd does."""
    inputs = torch.randn(64, WIDTH, requires_grad=True) * 1
    wanted = inputs.detach().cos()
    for name in ("host", "nvme", "contiguous"):
        source = inputs.detach().clone().requires_grad_()
        hidden = source * 1
        out = made(name, tmp_path)(torch.sin, hidden)
        with torch.no_grad():
            hidden.zero_()
        out.sum().backward()
        assert torch.equal(source.grad, wanted)
    shared = torch.rand(64, WIDTH)
    checkpointing = made("host", tmp_path)
    output = [checkpointing(torch.mul, inputs * 1, shared) for _ in range(2)]
    shared.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output[1].sum().backward()


def test_an_input_that_goes_on_in_the_same_memory(tmp_path: Path) -> None:
    """Each call's input is the one before it, changed in place: a copy is kept of each."""
    torch.manual_seed(fresh_seed())
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
    features = torch.randn(64, WIDTH)
    found = []
    for run in (None, made("host", tmp_path), made("contiguous", tmp_path)):
        hidden = features.clone().requires_grad_() * 1
        for weight in weights:
            if run is None:
                hidden = hidden + (hidden @ weight).sin()
            else:
                hidden.add_(run(lambda x, weight=weight: (x @ weight).sin(), hidden))
        found.append(torch.autograd.grad(hidden.square().sum(), weights))
    assert same(found[1], found[0]) and same(found[2], found[0])


def test_refused_functions(tmp_path: Path) -> None:
    inputs = torch.randn(8, WIDTH, requires_grad=True) * 1

    def changes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return x * y

    for name in ("recompute", "host"):
        checkpointing = made(name, tmp_path)
        with pytest.raises(RuntimeError, match=r"changes: it changed its input tensor 1, of shape \(8, 64\)"):
            checkpointing(changes, inputs, torch.ones(8, WIDTH))
        with pytest.raises(TypeError, match="expected an output with a tensor, got NoneType"):
            checkpointing(lambda x: None, inputs)
        with pytest.raises(TypeError, match="expected an output with a tensor, got list"):
            checkpointing(lambda x: [1, {"a": "b"}], inputs)
        assert checkpointing.used_bytes() == 0


def test_a_recomputation_that_differs_names_the_call(tmp_path: Path) -> None:
    inputs = torch.randn(8, WIDTH, requires_grad=True) * 1
    runs = {"count": 0}

    def fewer(x: torch.Tensor) -> torch.Tensor:
        runs["count"] += 1
        return x.sin().cos().tanh() if runs["count"] % 2 else x.sin()

    def other_shape(x: torch.Tensor) -> torch.Tensor:
        runs["count"] += 1
        return (x.sin() if runs["count"] % 2 else x[:4].sin()).cos().tanh()

    def other_dtype(x: torch.Tensor) -> torch.Tensor:
        runs["count"] += 1
        return (x.sin() if runs["count"] % 2 else x.double().sin()).cos()

    for function, said in (
        (fewer, "Number of tensors saved during forward: 3"),
        (other_shape, r"\[4, 64\]"),
        (other_dtype, "torch.float64"),
    ):
        runs["count"] = 0
        out = made("host", tmp_path)(function, inputs)
        with pytest.raises(CheckpointError, match=rf"(?s){function.__name__}: it ran differently.*{said}"):
            out.sum().backward()


def test_a_buffer_for_too_few_calls(tmp_path: Path) -> None:
    checkpointing = made("contiguous", tmp_path, number_checkpoints=3)
    with pytest.raises(
        BufferFullError, match=r"number_checkpoints: .* for 3 calls .*Raise number_checkpoints"
    ):
        gradients(Stack(4), checkpointing, fresh_seed())
    gc.collect()
    assert same(gradients(model := Stack(3), checkpointing, 1), gradients(model, None, 1))


def test_an_exception_in_the_function_leaves_nothing(tmp_path: Path) -> None:
    checkpointing = made("host", tmp_path)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        checkpointing(fails, torch.randn(64, WIDTH, requires_grad=True))
    gc.collect()
    assert checkpointing.used_bytes() == 0


def test_the_innermost_one_entered_is_current(tmp_path: Path) -> None:
    outer, inner = made("host", tmp_path), made("recompute", tmp_path)
    assert current_checkpointing().config == ActivationCheckpointingConfig()
    with outer:
        assert current_checkpointing() is outer
        with inner:
            assert current_checkpointing() is inner
        inputs = torch.randn(64, WIDTH, requires_grad=True)
        output = zero_ext.checkpoint_activations(torch.sin, inputs * 1)
        assert outer.used_bytes() == inputs.nbytes
        del output
    assert current_checkpointing() is not outer
    assert zero_ext.checkpoint.CheckpointError is not None  # the package keeps its name


def test_threads_enter_one_by_themselves(tmp_path: Path) -> None:
    """Not in the order in which they leave it."""
    checkpointing, entered, left = made("host", tmp_path), threading.Event(), threading.Event()
    found: list[bool] = []

    def other() -> None:
        with checkpointing:
            entered.set()
            left.wait(30)
            found.append(current_checkpointing() is checkpointing)
        found.append(current_checkpointing() is checkpointing)

    thread = threading.Thread(target=other)
    with checkpointing:
        thread.start()
        assert entered.wait(30)
    assert current_checkpointing() is not checkpointing
    left.set()
    thread.join()
    assert found == [True, False]


def test_profile_publishes_the_work(tmp_path: Path) -> None:
    checkpointing, events = made("profiled", tmp_path), []
    checkpointing.bus.subscribe(events.append)
    gradients(Stack(3), checkpointing, fresh_seed())
    assert all(isinstance(event, ActivationEnd) and event.seconds >= 0 for event in events)
    whats = [event.what for event in events]
    assert [whats.count(what) for what in ("offload", "fetch", "recompute")] == [3, 3, 3]
    assert {event.name for event in events if event.what != "fetch"} == {"Block"}
