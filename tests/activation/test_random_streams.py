"""Named streams of random numbers: apart from one another and from the default one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.activation.blocks import fresh_seed, same
from zero_ext.activation import MODEL_PARALLEL, ActivationCheckpointing, RandomStreams
from zero_ext.activation.checkpoint_call import Recomputation
from zero_ext.config import ActivationCheckpointingConfig


def test_streams_go_on_by_themselves() -> None:
    seed = fresh_seed()
    streams = RandomStreams("cpu")
    torch.manual_seed(seed)
    streams.add("a", seed + 1)
    streams.add("b", seed + 2)
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "default": []}
    for name in ("a", "b", "default", "a", "default", "b"):
        if name == "default":
            found[name].append(torch.rand(3))
        else:
            with streams.fork(name):
                found[name].append(torch.rand(3))
    for name, own in (("a", seed + 1), ("b", seed + 2), ("default", seed)):
        generator = torch.Generator().manual_seed(own)
        assert all(torch.equal(value, torch.rand(3, generator=generator)) for value in found[name])


def test_a_build_for_an_accelerator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    streams = RandomStreams()
    streams.add("a", 7)
    with streams.fork("a"):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_states_and_refusals() -> None:
    streams = RandomStreams("cpu")
    streams.seed_model_parallel(5, 1)
    states = streams.get_states()
    with streams.fork():
        first = torch.rand(2)
    streams.set_states(states)
    with pytest.raises(ZeroDivisionError), streams.fork():
        assert torch.equal(torch.rand(2), first)
        raise ZeroDivisionError
    with streams.fork():
        assert not torch.equal(torch.rand(2), first)  # what was drawn before an error stays drawn
    with pytest.raises(ValueError, match=r"random stream .*: it exists already"):
        streams.add(MODEL_PARALLEL, 1)
    with pytest.raises(ValueError, match=r"random stream .*: seed 2724 belongs to another"):
        streams.add("other", 5 + 2718 + 1)
    with pytest.raises(KeyError, match="random stream 'none': it was not added"), streams.fork("none"):
        pass
    streams.reset()
    assert streams.get_states() == {}


def noisy(x: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
    """Draws from every generator among the arguments, in their order."""
    for generator in pytree.tree_leaves((positional, named)):
        x = (x * torch.rand(x.shape, generator=generator)).sin()
    return x


@pytest.mark.parametrize("policy", [{}, {"tier": "host"}, {"save_ops": ("aten.mul",)}])
def test_generators_among_the_arguments_are_rewound(policy: dict[str, Any]) -> None:
    """Of calls in a row and inside one another; what the caller draws later does not know of it."""
    seed, checkpointing = fresh_seed(), ActivationCheckpointing(ActivationCheckpointingConfig(**policy))
    found = []
    for run in (lambda function, *positional, **named: function(*positional, **named), checkpointing):
        first, second, third = (torch.Generator().manual_seed(seed + number) for number in range(3))
        inputs = torch.randn(32, 16, generator=third).requires_grad_()
        hidden = run(noisy, inputs * 1, first, [{"a": (second, first)}], third=third)

        def twice(x: torch.Tensor, generator: torch.Generator, run: Any = run) -> torch.Tensor:
            return run(noisy, run(noisy, x, generator), generator)

        hidden = run(twice, hidden, first)
        between = [torch.rand(3, generator=each) for each in (first, second, third)]
        hidden.square().sum().backward()
        after = [torch.rand(3, generator=each) for each in (first, second, third)]
        found.append([hidden.detach(), inputs.grad, *between, *after])
    assert same(*found)


def test_a_generator_goes_back_after_a_recomputation_that_fails() -> None:
    generator, runs = torch.Generator().manual_seed(fresh_seed()), list[int]()

    def fails(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x = (x * torch.rand(x.shape, generator=generator)).sin()
        runs.append(1)
        if len(runs) == 2:
            raise ZeroDivisionError
        return x.cos()

    out = ActivationCheckpointing()(fails, torch.ones(4, 4, requires_grad=True), generator)
    before = generator.get_state()
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert torch.equal(generator.get_state(), before)


def test_a_recomputation_that_cannot_begin_leaves_streams_where_they_are() -> None:
    streams = RandomStreams("cpu")
    streams.add("a", 7)

    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise ZeroDivisionError
        yield

    again = Recomputation("call", streams, [], broken, None, lambda: None)
    with streams.fork("a"):
        torch.rand(3)
    before = streams.get_states()
    with pytest.raises(ZeroDivisionError), again:
        pass
    assert torch.equal(streams.get_states()["a"], before["a"])
