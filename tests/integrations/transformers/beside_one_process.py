"""Steps of a model that several ranks hold parts of, beside those of one process."""

from __future__ import annotations

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
) -> None:
    """Losses, norms and parameters of ``model`` on ``mesh`` are those of ``reference`` alone. ``losses`` give
    for every step this rank's of the model and the whole batch's of the reference."""
    model, optimizer = zero_ext.prepare(
        model, optimizer_of(model), {"stage": stage, "gradient_clipping": CLIP}, process_group=mesh
    )
    model.train()
    plain = optimizer_of(reference)
    for sharded_loss, loss_alone in losses:
        loss = sharded_loss(model)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        wanted = loss_alone(reference)
        wanted.backward()
        norm = float(nn.utils.clip_grad_norm_(reference.parameters(), CLIP))
        plain.step()
        plain.zero_grad()
        mean = torch.tensor(world.everyone(float(loss.detach())), dtype=torch.float64).mean().item()
        torch.testing.assert_close(mean, float(wanted.detach()), rtol=1e-5, atol=0)
        torch.testing.assert_close(engine_of(model).grad_norm, norm, rtol=1e-5, atol=0)
    found = zero_ext.full_state_dict(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
