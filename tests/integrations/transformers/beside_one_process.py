"""Steps of a model that is split over ranks, compared with those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.rank import World
from zero_ext.zero import engine_of

Loss = Callable[[Any], torch.Tensor]
CLIP = 0.5
ROUNDINGS = 4


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that does not make rounding large where gradients are nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def assert_steps_as_alone(
    world: World,
    mesh: DeviceMesh,
    model: Any,
    reference: nn.Module,
    stage: int,
    losses: Iterable[tuple[Loss, Loss]],
    **sections: Any,
) -> None:
    """Losses, norms and parameters of ``model`` on ``mesh`` are those of ``reference`` alone. ``losses`` give
    for every step this rank's of the model and the whole batch's of the reference. ``sections`` go into the
    configuration.

    A second reference starts with its parameters changed in the last bit. What that makes of a step is what
    rounding makes of it, so the tolerance grows with it: a few seeds are badly conditioned.
    """
    config = {"stage": stage, "gradient_clipping": CLIP, **sections}
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=mesh)
    model.train()
    rounded = rounded_copy(reference, world.seed)
    alone = [(each, optimizer_of(each)) for each in (reference, rounded)]
    for sharded_loss, loss_alone in losses:
        loss = sharded_loss(model)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected, nearby = (step_alone(*one, loss_alone) for one in alone)
        mean = torch.tensor(world.everyone(float(loss.detach())), dtype=torch.float64).mean().item()
        for found, one, other in zip((mean, engine_of(model).grad_norm), expected, nearby, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=ROUNDINGS * abs(one - other))
    full, nearby_values = zero_ext.full_state_dict(model), rounded.state_dict()
    for name, value in reference.state_dict().items():
        rounding = float((value - nearby_values[name]).abs().max()) if value.is_floating_point() else 0.0
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-5 + ROUNDINGS * rounding, msg=name)


def rounded_copy(model: nn.Module, seed: int) -> nn.Module:
    """``model`` with each value moved by one unit in the last place, or by none."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            units = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + units * torch.finfo(parameter.dtype).eps)
    return other


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss) -> tuple[float, float]:
    """Loss and gradient norm of one step in this process alone."""
    loss = loss_of(model)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), norm
