"""``checkpoint_activations``: arguments and compilation. ``zero_ext.checkpoint`` is a plain package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zero_ext
from tests.activation.blocks import WIDTH, Block, Stack, fresh_seed, gradients, same
from tests.activation.policies import made
from zero_ext.activation import checkpoint_activations


def test_the_call_needs_no_configuration() -> None:
    model, seed = Stack(), fresh_seed()
    assert same(gradients(model, zero_ext.checkpoint_activations, seed), gradients(model, None, seed))
    with pytest.raises(TypeError, match="expected an output with a tensor, got NoneType"):
        zero_ext.checkpoint_activations(lambda value: None, torch.ones(1, requires_grad=True))


def test_the_package_of_checkpoints_is_imported_like_any_other() -> None:
    """A fresh interpreter has no other imports."""
    program = """
import importlib, pickle, sys
import zero_ext.checkpoint.files as errors
from zero_ext.checkpoint import CheckpointError
import zero_ext.checkpoint
package = importlib.import_module("zero_ext.checkpoint")
assert zero_ext.checkpoint is package is sys.modules["zero_ext.checkpoint"]
assert zero_ext.checkpoint.files is errors
assert zero_ext.checkpoint.CheckpointError is CheckpointError is errors.CheckpointError
assert pickle.loads(pickle.dumps(package.LazyStateSource)) is package.LazyStateSource
assert package.__name__ == "zero_ext.checkpoint" and package.__doc__.startswith("Checkpoints: ")
assert not callable(package)
try:
    from zero_ext.checkpoint import nothing
except ImportError as error:
    assert "'nothing' from 'zero_ext.checkpoint'" in str(error), error
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_compiled(tmp_path: Path) -> None:
    """Around a compiled function everything holds; inside one it is torch's own higher-order op."""
    seed = fresh_seed()
    block, inputs = Block(dropout=0.0), torch.randn(8, WIDTH)

    def slopes(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        block.zero_grad()
        features = inputs.clone().requires_grad_()
        run(features * 1).square().sum().backward()
        return [features.grad, *(each.grad.clone() for each in block.parameters())]

    torch.manual_seed(seed)
    wanted = slopes(block)
    compiled, checkpointing = torch.compile(block, backend="aot_eager"), made("host", tmp_path)
    assert same(slopes(lambda x: checkpointing(compiled, x)), wanted)

    call = partial(zero_ext.checkpoint_activations, block)
    inside = torch.compile(call, backend="aot_eager", fullgraph=True)
    for found, expected in zip(slopes(inside), wanted, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_arguments_that_are_called_like_options_of_torch() -> None:
    """In both worlds; and what is refused in one is refused in the other."""

    def scaled(x: torch.Tensor, **named: float) -> torch.Tensor:
        return (x * sum(named.values())).sin()

    names = ("function", "self", "debug", "context_fn", "preserve_rng_state", "determinism_check")
    named = {name: number + 0.5 for number, name in enumerate((*names, "early_stop", "use_reentrant"))}
    inputs = torch.randn(8, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(scaled(inputs, **named).sum(), inputs)

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_activations(scaled, x, **named)

    def nothing(x: torch.Tensor) -> torch.Tensor:
        checkpoint_activations(lambda x: None, x)
        return x * 2

    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        assert torch.allclose(torch.autograd.grad(run(inputs).sum(), inputs)[0], wanted)
    for run in (nothing, torch.compile(nothing, backend="aot_eager")):
        with pytest.raises(TypeError, match="expected an output with a tensor, got NoneType"):
            run(inputs)
        with torch.no_grad():
            assert torch.equal(run(inputs), inputs * 2)
