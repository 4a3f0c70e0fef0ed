"""Clipping by calls against clipping by the configuration: the same bits, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import check_same
from zero_ext.offload import MASTER
from zero_ext.zero import engine_of
from zero_ext.zero.gradients.sharded_gradient import ShardedGradient

STEPS, CLIP = 3, 0.05
Clip = Callable[[nn.Module], object]
CLIPS: dict[str, Clip] = {
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    "torch, in parts": lambda model: nn.utils.clip_grads_with_norm_(
        model.parameters(), CLIP, nn.utils.get_total_norm([each.grad for each in model.parameters()])
    ),
    "model": lambda model: model.clip_grad_norm_(CLIP),  # type: ignore[operator]
}
PLACEMENTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"grads": "host", "optimizer": "host"}),
    (3, {"params": "host", "grads": "host", "optimizer": "host", "update_mode": "delayed"}),
]


def train(
    world: World, config: dict[str, object], clip: Clip | None, also: Clip | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Parameters after some steps, in which gradients are far above the norm that they are clipped to;
    ``also`` is called after ``clip``."""
    torch.manual_seed(world.seed)
    model = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 7)).to(device)
    model, optimizer = zero_ext.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), config, process_group=world.group
    )
    draw = torch.Generator().manual_seed(world.seed + world.rank)
    for _ in range(STEPS):
        inputs = torch.randn(5, 24, generator=draw).to(device, torch.bfloat16)
        model(inputs).float().square().sum().backward()
        assert clip is None or isinstance(model.module[0].weight.grad, ShardedGradient)
        if clip is not None:
            clip(model)
        if also is not None:
            also(model)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.optimizer_step.finish()
    masters = [
        master.state.read(MASTER, 0, master.unit.layout.shard_numel).cpu() for master in engine.masters
    ]
    # Rounding to bf16 would hide bits.
    return {**zero_ext.full_state_dict(model), "masters of this rank": torch.cat(masters)}


def config_of(stage: int, offload: dict[str, str], clip: float = 0.0) -> dict[str, object]:
    return {
        "stage": stage,
        "precision": {"dtype": "bf16"},
        "offload": offload,
        "gradient_clipping": clip,
        "timeout_seconds": 15.0,
    }


@on_ranks(2)
@pytest.mark.parametrize("how", CLIPS)
def test_clipping_by_calls_is_clipping_by_the_configuration(world: World, how: str) -> None:
    for stage, offload in PLACEMENTS:
        wanted = train(world, config_of(stage, offload, CLIP), None)
        found = train(world, config_of(stage, offload), CLIPS[how])
        check_same(found, wanted, (stage, offload))


@on_ranks(2, stand_in=True)
def test_on_a_device(world: World) -> None:
    torch.get_device_module("stand_in").set_schedule("eager")
    for how, clip in CLIPS.items():
        for stage in (1, 3):
            wanted = train(world, config_of(stage, {}, CLIP), None, device="stand_in")
            found = train(world, config_of(stage, {}), clip, device="stand_in")
            check_same(found, wanted, (how, stage))


def check_shown(model: nn.Module) -> None:
    """What is read between clipping and the step is clipped, rounded to the gradient's 16 bits."""
    factor = engine_of(model).views.factors.common(engine_of(model).reducer.gradients)
    assert 0.0 < factor < 1.0
    engine = engine_of(model)
    unclipped = {}
    for gradients in engine.reducer.gradients:
        for number in gradients.contributed:
            engine.views.factors.pop((gradients, number), None)
    for name, parameter in model.named_parameters():
        unclipped[name] = zero_ext.full_gradient(parameter)
    engine.views.multiply_all(factor)
    for name, parameter in model.named_parameters():
        shown = zero_ext.full_gradient(parameter)
        assert torch.equal(shown, (unclipped[name].float() * factor).bfloat16()), name
        assert torch.equal(parameter.grad.clone(), shown)
        assert float(parameter.grad.norm()) == pytest.approx(float(shown.double().norm()), rel=0.01)


@on_ranks(2)
def test_reading_clipped_gradients_shows_and_changes_nothing(world: World) -> None:
    for stage, offload in PLACEMENTS:
        config = config_of(stage, offload)
        plain = train(world, config, CLIPS["torch"])
        read = train(world, config, CLIPS["torch"], also=check_shown)
        check_same(read, plain, (stage, offload))


def in_place(model: nn.Module) -> None:
    """Clipping as it rounds: the factor of the whole gradients' exact norm."""
    values = {each: zero_ext.full_gradient(each) for each in model.parameters()}
    norm = torch.stack([each.double().norm() for each in values.values()]).norm()
    factor = float(torch.clamp(CLIP / (norm + 1e-6), max=1.0))
    for parameter, value in values.items():
        parameter.grad = value.mul_(factor).to(parameter.dtype)


EDITS: dict[str, Clip] = {
    "another factor": lambda model: [each.grad.mul_(0.5) for each in model.parameters()],
    "one of them": lambda model: model.module[0].bias.grad.add_(0.25),
    "one is replaced": lambda model: setattr(model.module[0].bias, "grad", model.module[0].bias.grad * 2),
    "one is zeroed": lambda model: model.module[2].weight.grad.zero_(),
    "one is cleared": lambda model: setattr(model.module[2].weight, "grad", None),
    "another pass": lambda model: model(torch.ones(2, 24, dtype=torch.bfloat16)).sum().backward(),
}


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("edit", EDITS)
def test_whatever_else_changes_gradients_finds_them_clipped(world: World, edit: str) -> None:
    """As if each had been multiplied in place at once; what is left of clipping comes before."""
    for stage, offload in PLACEMENTS[:-1]:
        config = config_of(stage, offload)
        found = train(world, config, CLIPS["torch"], also=EDITS[edit])
        wanted = train(world, config, in_place, also=EDITS[edit])
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=2e-4, msg=f"{stage} {name}")
