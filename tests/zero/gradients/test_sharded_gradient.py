"""Sharded gradients: reads, writes and assignments are as in torch, or refused on all ranks."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.gradients.test_accumulator import after_backward, check_step, close, every_stage, total_norm
from tests.zero.models import WIDTH, TinyModel, language_batch, language_loss
from tests.zero.training import placed, plain_backward, prepared, sgd
from zero_ext.zero import engine_of


class Holder(nn.Parameter):
    """A parameter-like whose gradient is given."""

    def __new__(cls, gradient: torch.Tensor) -> Any:
        made = torch.nn.Parameter(torch.zeros(gradient.shape))
        made.grad = gradient
        return made


MASK = (torch.arange(23 * WIDTH) % 3).reshape(23, WIDTH).float()
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "abs().max()": lambda g: g.abs().max(),
    "isfinite": lambda g: g.isfinite().all(),
    "item": lambda g: g[0, 0].item(),
    "float": lambda g: float(g[1, 2]),
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach().clone(),
    "data": lambda g: g.data + 0,
    "norm over a dim": lambda g: g.norm(dim=0),
    "cosine": lambda g: nn.functional.cosine_similarity(g.flatten(), MASK.flatten(), dim=0),
    "deepcopy": copy.deepcopy,
    "copy": lambda g: copy.copy(g) * 2,
    "format": lambda g: f"{g.abs().max():.3e}",
    "cpu": lambda g: g.cpu() * 2,
    "numpy": lambda g: g.numpy().copy(),
    "tolist": lambda g: g.tolist(),
    "norm of a row": lambda g: g[2].norm(),
    "transposed": lambda g: g.t() @ MASK,
    "flat": lambda g: torch.cat([g.view(-1), g.reshape(-1)[3:7], g.T.flatten()]),
    "iteration": lambda g: torch.stack([row.mean() for row in g]),
    "bits": lambda g: g.view(torch.int32).sum(),
    "histogram": lambda g: torch.histc(g, 5, -1.0, 1.0),
    "expanded": lambda g: g.unsqueeze(0).expand(2, -1, -1).sum((0, 1)),
    "foreach": lambda g: torch._foreach_add([g, MASK], [MASK, g], alpha=0.5)[1],
    "stacked": lambda g: torch.stack([g, g]),
    "empty_like": lambda g: tuple(torch.empty_like(g).stride()),
    "noise": lambda g: torch.manual_seed(5) and torch.randn_like(g),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda g: g.add_(MASK),
    "clamp_": lambda g: g.clamp_(-0.01, 0.02),
    "clip_grad_value_": lambda g: nn.utils.clip_grad_value_(Holder(g), 0.01),
    "clip_grad_value_ in a loop": lambda g: nn.utils.clip_grad_value_(Holder(g), 0.01, foreach=False),
    "mul_ by a mask": lambda g: g.mul_(MASK),
    "mul_ by itself": lambda g: g.mul_(g),
    "mul_ by an inference tensor": lambda g: g.mul_(inference_number()),
    "div_ by a row": lambda g: g.div_(1 + MASK[0]),
    "copy_": lambda g: g.copy_(MASK),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "setitem": lambda g: g.__setitem__((slice(2, 4), 1), 0.5),
    "setitem by a mask": lambda g: g.__setitem__(MASK > 1, 0.0),
    "row": lambda g: g[3].mul_(2.0),
    "through views": lambda g: g.view(-1)[5:50].view(9, 5).t().add_(1.0),
    "through data": lambda g: g.data[1].fill_(0.125),
    "through detach": lambda g: g.detach().add_(MASK, alpha=0.1),
    "augmented": lambda g: g.__iadd__(MASK).__imul__(0.5),
    "out": lambda g: torch.add(g, MASK, out=g),
    "foreach add": lambda g: torch._foreach_add_([g, torch.zeros(2)], [MASK, torch.ones(2)], alpha=0.5),
    "foreach addcmul": lambda g: torch._foreach_addcmul_([g], [MASK], [MASK], [0.5]),
    "sorted": lambda g: g.copy_(g.sort(dim=0).values),
    "noise": lambda g: torch.manual_seed(7) and g.add_(torch.randn_like(g)),
    "random in place": lambda g: torch.manual_seed(7) and g.normal_(),
}


@torch.inference_mode()
def inference_number() -> torch.Tensor:
    return torch.tensor(0.5)


def second_pass(world: World, model: Any, twin: nn.Module) -> None:
    """A backward pass over another batch on both sides."""
    language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
    plain_backward(world, twin, 1)


def tensors(value: Any) -> Any:
    return value if isinstance(value, tuple | str) else torch.as_tensor(value)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("read", list(READS))
def test_any_read_sees_the_true_gradient(world: World, read: str) -> None:
    for model, optimizer, twin in every_tier(world):
        got, wanted = (tensors(READS[read](net.head.weight.grad)) for net in (model, twin))
        if isinstance(got, str):
            assert got == wanted
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
        check_step(model, optimizer, twin)


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize("write", list(WRITES))
def test_any_write_reaches_the_update(world: World, write: str) -> None:
    for model, optimizer, twin in every_tier(world):
        for net in (model, twin):
            WRITES[write](net.head.weight.grad)
        close(zero_ext.full_gradient(model.head.weight), twin.head.weight.grad)
        close(total_norm(model), total_norm(twin))
        check_step(model, optimizer, twin)


def every_tier(world: World) -> Iterator[tuple[Any, Any, nn.Module]]:
    """The result of :func:`after_backward` in stages 1 to 3 and with gradients on the host and on NVMe."""
    for stage in (1, 2, 3):
        yield after_backward(world, stage)
    for stage, tier in ((2, "host"), (3, "nvme")):
        with placed({"grads": tier, "optimizer": tier}) as offload:
            yield after_backward(world, stage, offload=offload)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_gradients_that_would_differ_between_ranks_are_refused_on_all(
    world: World, stage: int, how: str
) -> None:
    model, optimizer, _ = after_backward(world, stage)
    before = zero_ext.full_gradient(model.head.weight)
    assert before is not None
    noise = torch.full((23, WIDTH), float(world.rank))
    with pytest.raises(RuntimeError, match=r"'head\.weight'.*same value on all ranks, got another on ranks"):
        if how == "in place":
            model.head.weight.grad.add_(noise)
        else:
            model.head.weight.grad = noise
            optimizer.step()
    if how == "in place":
        assert torch.equal(zero_ext.full_gradient(model.head.weight), before)


@on_ranks(2)
def test_uses_of_a_gradient_that_cannot_be_right_name_the_call(world: World) -> None:
    for stage in (1, 2, 3):
        model, optimizer, _ = after_backward(world, stage)
        gradient = model.head.weight.grad
        with pytest.raises(RuntimeError, match=r"'head\.weight'.*already their mean.*Drop that call"):
            torch.distributed.all_reduce(gradient)
        factor = torch.ones((), requires_grad=True)
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*full_gradient"):
            (factor * gradient).sum().backward()
        assert not gradient.numpy().flags.writeable
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*after it was cleared"):
            gradient.sum()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_keep_the_bits_that_they_do_not_show(world: World, stage: int) -> None:
    """Sums of passes are kept in float32; a write to one row rounds no other."""
    precision, batch = {"dtype": "bf16", "grad_accum_dtype": "fp32"}, {"gradient_accumulation_steps": 2}
    model, _ = prepared(world, TinyModel(layers=1), stage, sgd, precision=precision, batch=batch)
    for micro in range(2):
        language_loss(model, language_batch(world.seed, 0, micro, world.rank)).backward()
    before = zero_ext.full_gradient(model.head.weight)
    assert before is not None and before.dtype == torch.float32
    assert not torch.equal(before.bfloat16().float(), before)
    shown = model.head.weight.grad
    assert shown.dtype == torch.bfloat16 and torch.equal(shown.clone(), before.bfloat16())
    shown[0].add_(1.0)
    shown.view(-1)[WIDTH:].mul_(2.0)
    after = zero_ext.full_gradient(model.head.weight)
    close(after[0], before[0] + 1.0)
    assert torch.equal(after[1:], before[1:] * 2.0)


@on_ranks(1, 2)
def test_assigning_a_gradient(world: World) -> None:
    for model, optimizer, twin in every_tier(world):
        for net in (model, twin):
            net.head.weight.grad = MASK.clone()
            net.norm.bias.grad = net.norm.bias.grad * 0.5 + 0.01
            net.blocks[0].up.weight.grad = net.blocks[0].up.weight.grad
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_gradients_from_autograd_grad(world: World) -> None:
    """Without a backward pass before; averaged over the ranks by hand, as any data-parallel loop must."""
    for model, optimizer, twin in every_tier(world):
        for net in (model, twin):
            net.zero_grad()
        loss = language_loss(model, language_batch(world.seed, 1, 0, world.rank))
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            torch.distributed.all_reduce(gradient, group=world.group)
            parameter.grad = gradient / world.size
        plain_backward(world, twin, 1)
        check_step(model, optimizer, twin)


@on_ranks(2)
def test_a_pass_after_an_assignment_adds_to_it(world: World) -> None:
    for model, optimizer, twin in every_tier(world):
        for net in (model, twin):
            net.zero_grad()
            net.head.weight.grad = MASK * 0.1
        second_pass(world, model, twin)
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_assigning_a_gradient_while_others_wait_to_be_reduced(world: World) -> None:
    """The passes of before are reduced first, and it replaces the sum, as in torch."""
    for stage in (0, 1, 2, 3):
        for reduced_before in (False, True):
            model, optimizer, twin = after_backward(world, stage)
            if not reduced_before:
                optimizer.zero_grad()
                twin.zero_grad()
            with model.no_sync():
                second_pass(world, model, twin)
            for net in (model, twin):
                net.head.weight.grad = MASK.clone()
            check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_parameters_may_exchange_their_gradients(world: World) -> None:
    for model, optimizer, twin in every_stage(world):
        for net in (model, twin):
            one, two = net.blocks[0].up, net.blocks[1].up
            one.weight.grad, two.weight.grad = two.weight.grad, one.weight.grad
            one.bias.grad, two.bias.grad = two.bias.grad, None
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
def test_data_of_a_gradient_may_be_assigned(world: World) -> None:
    for model, optimizer, twin in every_stage(world):
        for net in (model, twin):
            net.head.weight.grad.data = MASK * 0.5
            gradients = [p.grad for p in net.blocks.parameters()]
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(gradients) * 0.5, gradients)
            net.norm.weight.grad = net.norm.weight.data
            net.norm.bias.grad = net.norm.bias.detach() + 0.25
        check_step(model, optimizer, twin)


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["optimizer", "module", "none"])
def test_a_retained_gradient_is_not_the_next_one(world: World, how: str) -> None:
    for model, optimizer, twin in every_stage(world):
        held, wanted = model.head.weight.grad, twin.head.weight.grad.clone()
        if how == "none":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            {"optimizer": optimizer, "module": model}[how].zero_grad()
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        if engine_of(model).config.stage == 0 or world.size == 1:
            close(held, wanted)
            continue
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*after it was cleared.*clone\(\)"):
            held.sum()
        model.head.weight.grad = held
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*after it was cleared"):
            optimizer.step()


@on_ranks(2)
def test_the_next_gradient_is_the_same_object_unless_this_one_is_known(world: World) -> None:
    for stage in (1, 2, 3):
        model, optimizer, _ = after_backward(world, stage)
        view = model.head.weight.grad.view(-1)
        model.norm.weight.grad.mark = True
        unknown = weakref.ref(model.norm.bias.grad)
        optimizer.zero_grad()
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*after it was cleared"):
            view.sum()
        assert not hasattr(model.norm.weight.grad, "mark")
        assert unknown() is model.norm.bias.grad
        close(unknown().sum(), zero_ext.full_gradient(model.norm.bias).sum())


EDITS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "mul_": lambda g, rank: g.mul_(rank + 1),
    "div_ by a tensor": lambda g, rank: g.div_(torch.tensor(rank + 1.0)),
    "clamp_": lambda g, rank: g.clamp_(max=0.01 * rank),
    "foreach": lambda g, rank: torch._foreach_mul_([g], [rank + 0.5]),
    "zero_ on one rank": lambda g, rank: g.zero_() if rank else None,
}


@on_ranks(2)
@pytest.mark.parametrize("edit", list(EDITS))
def test_numbers_that_differ_between_ranks_are_refused_on_all(world: World, edit: str) -> None:
    for stage in (1, 2, 3):
        model, optimizer, twin = after_backward(world, stage)
        model.head.weight.grad.mul_(0.5)
        EDITS[edit](model.head.weight.grad, world.rank)
        with pytest.raises(RuntimeError, match=r"expected the same calls with the same numbers on all ranks"):
            optimizer.step()
        optimizer.zero_grad()
        twin.zero_grad()
        second_pass(world, model, twin)
        check_step(model, optimizer, twin)


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.storage(),
    "share_memory_": lambda g: g.share_memory_(),
    "from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "apply_": lambda g: g.apply_(lambda x: x),
    "map_": lambda g: g.map_(g, lambda x, y: x),
    "set_": lambda g: g.set_(MASK),
    "resize_": lambda g: g.resize_(2),
    "pickle": pickle.dumps,
    "torch.save": lambda g: torch.save({"gradient": g}, io.BytesIO()),
    "data of another shape": lambda g: setattr(g, "data", torch.zeros(2)),
}


@on_ranks(2)
@pytest.mark.parametrize("use", list(MEMORY))
def test_uses_of_its_memory_are_refused_by_name(world: World, use: str) -> None:
    for stage in (1, 2, 3):
        model, optimizer, twin = after_backward(world, stage)
        with pytest.raises(RuntimeError, match=r"'head\.weight'\.grad.*(full_gradient|param\.grad)"):
            MEMORY[use](model.head.weight.grad)
        check_step(model, optimizer, twin)
