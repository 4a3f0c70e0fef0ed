"""What the tests of the device share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zero_ext
from tests.ops.helpers import same_values
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import Plan, adamw, configuration
from zero_ext.zero import engine_of


def on(device: torch.device, value: Tensor | None) -> Tensor | None:
    """A copy of `value` on `device`."""
    return None if value is None else value.clone().to(device)


def assert_adam(found: Any, wanted: Any, before: Any) -> None:
    """The device's step of Adam, `found`, is the CPU's, `wanted`, both from the state `before`.

    The moments are equal bit for bit, and the parameters are the master weights, cast. These may differ by
    what `pow` does: everything else in Adam is IEEE-exact on both sides, in one order of operations, but CUDA
    states 2 units in the last place of float64 for the `pow` of the bias corrections, and the host's library
    has an error of its own. The two float32 factors made of it are then one unit apart at most. With the
    roundings that follow, of the denominator and of the quotient, the update is off by four parts in 2**23, a
    unit being at most one such part of its value, and the master weight by one rounding more.
    """
    for name in wanted.named():
        if name.startswith("exp_avg"):
            one, two = getattr(found, name).cpu(), getattr(wanted, name)
            assert torch.equal(one, two) if one.dtype == torch.uint8 else same_values(one, two), name
    inside, decay = torch.zeros(wanted.master.numel(), dtype=torch.bool), torch.zeros(wanted.master.numel())
    for (begin, end), row in zip(wanted.segments.tolist(), wanted.hyper.tolist(), strict=True):
        inside[begin:end], decay[begin:end] = True, row[0] * row[4] * row[6]
    master, start, unit = found.master.cpu(), before.master.cpu().double(), 2.0**-23
    assert same_values(master[~inside], wanted.master[~inside])
    update = (wanted.master.double() - start * (1 - decay.double())).abs()
    bound = unit * (4 * update + torch.maximum(wanted.master.double().abs(), master.double().abs()))
    over = (master.double() - wanted.master.double()).abs() - bound
    assert bool((over <= 0).all()), f"master: {float(over.max())} beyond the bound"
    if wanted.param is not None:
        param = found.param.cpu()
        assert same_values(param[inside], master[inside].to(param.dtype)), "param"
        assert same_values(param[~inside], wanted.param[~inside]), "param outside the segments"


def captured(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """`work` as a CUDA graph, to be replayed; on other devices `work` itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def train(
    device: torch.device,
    stage: int,
    plan: Plan,
    seed: int,
    make: Callable[[], Any] = TinyModel,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = adamw,
    **more: Any,
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, final parameters on the CPU and the engine of a prepared model trained on `device`."""
    torch.manual_seed(seed)
    model = make().to(device)
    prepared, optimizer = zero_ext.prepare(
        model, optimizer_of(model.parameters()), configuration(stage, plan, **more)
    )
    losses = []
    for step in range(plan.steps):
        for micro in range(plan.micro_batches):
            loss = language_loss(prepared, language_batch(seed, step, micro, 0).to(device))
            prepared.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.cpu() for name, value in zero_ext.full_state_dict(prepared).items()}
    return losses, state, engine_of(prepared)


def assert_same(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    """Bit-identical losses and parameters."""
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name


def assert_near(one: tuple[Any, ...], two: tuple[Any, ...], tolerance: float) -> None:
    """Losses within `tolerance`, relative, and parameters within it in norm."""
    for first, second in zip(one[0], two[0], strict=True):
        assert abs(first - second) <= tolerance * abs(second), (one[0], two[0])
    assert one[1].keys() == two[1].keys()
    difference = norm([one[1][name].double() - value.double() for name, value in two[1].items()])
    assert difference <= tolerance * norm([value.double() for value in two[1].values()])


def norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them together."""
    return float(sum(tensor.square().sum() for tensor in tensors)) ** 0.5
