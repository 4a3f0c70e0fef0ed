"""Training under ZeroStrategy: the loss curves of Lightning's own DDPStrategy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

import zero_ext
from tests.integrations.lightning.modules import Language, enter, largest_difference, loader, trainer
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import distance
from zero_ext.integrations.lightning import ZeroStrategy
from zero_ext.zero import engine_of

MODULE = "tests.integrations.lightning.test_training"
HOST = {"params": "host", "grads": "host", "optimizer": "host"}


@on_ranks(2)
def test_losses_are_those_of_ddp_in_every_stage_with_accumulation_clipping_and_schedule(world: World) -> None:
    enter(world)
    # 6 batches an epoch and rank, in groups of 4: the last step of an epoch has 2.
    arguments: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 4, "gradient_clip_val": 0.05}
    for settings in ({"max_epochs": 3}, arguments):
        plain = Language(world.seed)
        trainer(world, DDPStrategy(), **settings).fit(plain, loader(world.seed))
        assert len(plain.losses) == 18 and len(set(plain.rates)) > 2
        for stage, config in ((1, {}), (2, {}), (3, {}), (3, {"offload": HOST})):
            module = Language(world.seed)
            made = trainer(world, ZeroStrategy(stage, config), **settings)
            made.fit(module, loader(world.seed))
            assert largest_difference(module.losses, plain.losses) < 1e-5, (stage, config)
            assert module.rates == plain.rates
            assert distance(zero_ext.full_state_dict(module), plain.state_dict()) < 1e-4
            engine = engine_of(module)
            assert engine.config.stage == stage and engine.world_size == 2
            assert engine.steps == made.global_step == (6 if len(settings) > 1 else 18)
            # Once a step, whatever number of micro-batches it has.
            assert set(module.reductions.values()) == {engine.steps}
            assert all(unit.placement.params == (stage == 3) for unit in engine.units)


@on_ranks(2)
def test_fit_test_fit_is_that_of_ddp_with_other_stages_and_strategies(world: World) -> None:
    enter(world)

    def run(first: Any, second: Any) -> tuple[list[float], list[float], Language]:
        module, tested = Language(world.seed), []
        for strategy in (first, second):
            made = trainer(world, strategy, max_epochs=1)
            made.fit(module, loader(world.seed))
            tested.append(made.test(module, loader(world.seed + 1), verbose=False)[0]["test_loss"])
            made.fit_loop.max_epochs = 2
            made.fit(module, loader(world.seed + 2))
        return module.losses, tested, module

    losses, tested, plain = run(DDPStrategy(), DDPStrategy())
    assert len(losses) == 24
    for first, second in (
        (ZeroStrategy(3), ZeroStrategy(3)),
        (ZeroStrategy(2), ZeroStrategy(3, {"offload": HOST})),
    ):
        found, seen, module = run(first, second)
        assert largest_difference(found, losses) < 1e-5
        assert largest_difference(seen, tested) < 1e-5
        assert distance(zero_ext.full_state_dict(module), plain.state_dict()) < 1e-4


class Evaluated(Language):
    """Notes whether an update is under way, in training and in evaluation."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.in_progress: dict[str, set[bool]] = {"training": set(), "validation": set()}

    def note(self, phase: str) -> None:
        self.in_progress[phase].add(engine_of(self).updates.in_progress)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.note("training")
        return super().training_step(batch, index)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.note("validation")
        super().validation_step(batch, index)


@on_ranks(2)
def test_evaluation_within_a_fit_sees_delayed_updates(world: World) -> None:
    enter(world)
    module = Evaluated(world.seed)
    strategy = ZeroStrategy(3, {"offload": {**HOST, "update_mode": "delayed"}})
    made = trainer(world, strategy, max_epochs=2, val_check_interval=2)
    made.fit(module, loader(world.seed), loader(world.seed + 1))
    assert module.in_progress == {"training": {False, True}, "validation": {False}}
