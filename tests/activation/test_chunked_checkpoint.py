"""``checkpoint_in_chunks``: values and gradients of one call, memory of a chunk, one gather per pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_ext
from tests.activation.live_bytes import LiveBytes
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import checkpoint_in_chunks
from zero_ext.activation import RandomStreams
from zero_ext.zero import engine_of

WIDTH, INNER = 8, 24


def network(dropout: float = 0.0, width: int = WIDTH, inner: int = INNER) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width))


def backward(function: Callable[[Tensor], Tensor], module: nn.Module, hidden: Tensor) -> list[Tensor]:
    """The output, and the gradients of its squares' sum with respect to input and parameters."""
    leaf = hidden.clone().requires_grad_()
    output = function(leaf)
    found = torch.autograd.grad(output.square().sum(), [leaf, *module.parameters()])
    return [output.detach(), *found]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 11), (33,), (2, 3, 5)])
@pytest.mark.parametrize("chunk", [1, 4, 33, 1000, "auto"])
def test_outputs_and_gradients_are_those_of_one_call(shape: tuple[int, ...], chunk: Any) -> None:
    module, hidden = network().double(), torch.randn(*shape, WIDTH, dtype=torch.float64)
    sizes: list[torch.Size] = []
    module.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape))
    found = backward(partial(checkpoint_in_chunks, module, chunk_tokens=chunk), module, hidden)
    tokens = hidden[..., 0].numel()
    chunks = -(-tokens // (256 if chunk == "auto" else chunk))
    assert len(sizes) == 2 * chunks
    assert max(size[:-1].numel() for size in sizes) == -(-tokens // chunks)
    assert all(len(size) == hidden.dim() for size in sizes)
    assert_close(found, backward(module, module, hidden), 1e-12)


def test_auto_is_the_width_of_wide_tokens() -> None:
    sizes: list[int] = []
    checkpoint_in_chunks(lambda x: sizes.append(len(x)) or x, torch.zeros(600, 300))
    assert sizes == [300, 300]


def test_no_tokens() -> None:
    assert checkpoint_in_chunks(network(), torch.zeros(2, 0, WIDTH)).shape == (2, 0, WIDTH)


def test_tensors_of_the_same_tokens_are_cut_alike() -> None:
    hidden, other = torch.randn(3, 5, WIDTH, requires_grad=True), torch.randn(3, 5, 2, requires_grad=True)
    weight = torch.randn(WIDTH, 2)

    def function(first: Tensor, second: Tensor) -> Tensor:
        return (first @ weight) * second

    found = checkpoint_in_chunks(function, hidden, other, chunk_tokens=4)
    expected = function(hidden, other)
    assert_close([found], [expected], 1e-6)
    gradients = [torch.autograd.grad(each.sum(), [hidden, other]) for each in (found, expected)]
    assert_close([*gradients[0]], [*gradients[1]], 1e-6)


def test_random_numbers_are_those_of_the_first_run() -> None:
    """Also of a named stream. Chunks without checkpoints, called in the same order, draw the same numbers."""
    module, streams = network(dropout=0.5), RandomStreams("cpu")
    hidden = torch.randn(17, WIDTH)

    def function(chunk: Tensor) -> Tensor:
        with streams.fork():
            return nn.functional.dropout(module(chunk), 0.5)

    def plain(full: Tensor) -> Tensor:
        return torch.cat([function(each) for each in full.tensor_split(4)])

    found = []
    checkpointing = zero_ext.activation.ActivationCheckpointing(streams=streams)
    for each in (partial(checkpoint_in_chunks, function, chunk_tokens=5), plain):
        streams.seed_model_parallel(7, 0)
        with checkpointing:
            found.append(backward(each, module, hidden))
    assert_close(*found, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_the_first_run(dtype: torch.dtype) -> None:
    module, hidden = network(), torch.randn(64, WIDTH)
    seen: list[torch.dtype] = []
    module[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))

    def cast(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(leaf: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return function(leaf)

        return call

    found = backward(cast(partial(checkpoint_in_chunks, module, chunk_tokens=10)), module, hidden)
    assert seen == [dtype] * 14
    for one, other in zip(found, backward(cast(module), module, hidden), strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 8 * torch.finfo(dtype).eps


def test_chunks_inside_a_checkpointed_block() -> None:
    module, hidden = network(dropout=0.3).double(), torch.randn(12, WIDTH, dtype=torch.float64)
    chunked = partial(checkpoint_in_chunks, module, chunk_tokens=5)
    found = []
    for function in (chunked, partial(zero_ext.checkpoint_activations, chunked)):
        torch.manual_seed(3)
        found.append(backward(function, module, hidden))
    assert_close(*found, 0)


def peak(chunk: int | None, tokens: int, width: int, inner: int, train: bool = True) -> int:
    module, hidden = network(width=width, inner=inner), torch.randn(tokens, width, requires_grad=train)
    call = module if chunk is None else partial(checkpoint_in_chunks, module, chunk_tokens=chunk)
    with LiveBytes() as live, torch.set_grad_enabled(train):
        output = call(hidden)
        if train:
            output.sum().backward()
    return live.peak


@pytest.mark.parametrize("train", [True, False])
def test_memory_is_that_of_a_chunk(train: bool) -> None:
    """Of a chunk four tensors of the inner width at most: input and output of GELU, and their gradients."""
    tokens, width, inner = 4096, 16, 256
    narrow, weights = 6 * tokens * width * 4, 6 * width * inner * 4
    found = {chunk: peak(chunk, tokens, width, inner, train) for chunk in (1024, 256, 64)}
    for chunk, nbytes in found.items():
        assert nbytes <= 4 * chunk * inner * 4 + narrow + weights
    assert found[1024] > found[256] > found[64]
    assert peak(None, tokens, width, inner, train) >= 2 * tokens * inner * 4 > 3 * found[256]


def test_autograd_saves_the_input_alone() -> None:
    module, hidden = network(), torch.randn(2, 16, WIDTH, requires_grad=True)
    storages = set()

    def pack(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = checkpoint_in_chunks(module, hidden, chunk_tokens=4)
    assert output.requires_grad
    sized = {each for each in storages if each != hidden.untyped_storage()._cdata}
    assert len(sized) <= 1  # an empty tensor, which torch's checkpoint saves


def test_compiled() -> None:
    module, hidden = network(), torch.randn(10, WIDTH)
    chunked = partial(checkpoint_in_chunks, module, chunk_tokens=4)
    compiled = torch.compile(lambda x: chunked(x), backend="aot_eager", fullgraph=True)
    assert_close(backward(compiled, module, hidden), backward(chunked, module, hidden), 1e-6)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda x: checkpoint_in_chunks(abs, x, chunk_tokens=0), ValueError, "chunk_tokens: expected 'auto'"),
        (lambda x: checkpoint_in_chunks(abs, x, chunk_tokens=True), ValueError, "chunk_tokens: expected"),
        (lambda x: checkpoint_in_chunks(abs, x[0]), ValueError, r"abs: expected tensors .* got \(2,\)"),
        (lambda x: checkpoint_in_chunks(abs, x, x[:2]), ValueError, r"got \(6, 2\) and \(2, 2\)"),
        (lambda x: checkpoint_in_chunks(torch.sum, x), TypeError, r"sum: expected one tensor .* got \(\)"),
        (lambda x: checkpoint_in_chunks(lambda y: (y, y), x), TypeError, "for as many tokens, got tuple"),
    ],
)
def test_mistakes_are_refused(call: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        call(torch.ones(6, 2))


class Block(nn.Module):
    """A residual network, in chunks or in one call."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        self.inner, self.chunk = network(), chunk

    def forward(self, hidden: Tensor) -> Tensor:
        if self.chunk is None:
            return hidden + self.inner(hidden)
        return hidden + checkpoint_in_chunks(self.inner, hidden, chunk_tokens=self.chunk)


class Blocks(nn.Module):
    """The mean square of three blocks, each checkpointed if ``nested``."""

    def __init__(self, chunk: int | None, nested: bool) -> None:
        super().__init__()
        self.blocks, self.nested = nn.ModuleList(Block(chunk) for _ in range(3)), nested

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = zero_ext.checkpoint_activations(block, hidden) if self.nested else block(hidden)
        return hidden.square().mean()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_are_gathered_once_per_pass(world: World, nested: bool, stage: int) -> None:
    """Steps of one process, and the traffic of the same model without chunks."""
    torch.manual_seed(world.seed)
    alone = Blocks(None, nested=False)
    initial = copy.deepcopy(alone.state_dict())
    steps = torch.randn(3, world.size, 9, WIDTH, generator=torch.Generator().manual_seed(world.seed))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for hidden in steps:
        optimizer.zero_grad()
        torch.stack([alone(each) for each in hidden]).mean().backward()
        optimizer.step()
    traffic = []
    for chunk in (None, 2):
        model = Blocks(chunk, nested)
        model.load_state_dict(initial)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded, sharded_optimizer = zero_ext.prepare(
            model, made, {"stage": stage}, process_group=world.group
        )
        for hidden in steps:
            sharded.backward(sharded(hidden[world.rank]))
            sharded_optimizer.step()
            sharded_optimizer.zero_grad()
        traffic.append(dict(engine_of(sharded).traffic.last_elements))
        full = zero_ext.full_state_dict(sharded)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=1e-6, atol=1e-6, msg=name)
    assert traffic[0] == traffic[1]
