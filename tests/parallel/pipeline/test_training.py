"""Pipelines with ZeRO in every stage: as one process, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import Trained, train, train_alone
from tests.parallel.training import assert_same_steps, assert_same_values

STAGES = [0, 1, 2, 3]
TIED = ("layers.0.weight", "layers.9.weight")


def assert_as_alone(trained: Trained, seed: int, samples: int, clip: float = 0.0) -> None:
    """Losses, norms and this rank's parameters are those of one process."""
    alone = train_alone(seed, samples, clip)
    assert_same_steps((trained.losses, trained.evaluated), (alone.losses, alone.evaluated))
    if clip:
        assert_same_steps(trained.norms, alone.norms)
    assert_same_values(trained.parameters, alone.parameters)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_steps_are_those_of_one_process(world: World, pp: int, stage: int) -> None:
    trained = train(world.seed, pp, {"stage": stage, "gradient_clipping": 0.5})
    assert_as_alone(trained, world.seed, 8 * 4 // pp, clip=0.5)
    # All stages have the same bits of the parameter that the first and the last of them share.
    of_embedding = [trained.parameters[name] for name in TIED if name in trained.parameters]
    everyone = [each for own in world.everyone(of_embedding) for each in own]
    assert len(everyone) >= min(pp, 2) and all(torch.equal(each, everyone[0]) for each in everyone)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", None), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", None)],
)
def test_schedules(world: World, schedule: str, chunks: int | None, stage: int) -> None:
    trained = train(
        world.seed, 2, {"stage": stage, "gradient_clipping": 0.5}, schedule=schedule, chunks=chunks
    )
    assert_as_alone(trained, world.seed, 16, clip=0.5)
    passes = [(slot.what, slot.stage, slot.micro_batch) for slot in trained.pipeline.slots]
    assert len(set(passes)) == len(passes)
    assert passes.count(passes[0]) == 1
    forwards = [slot for slot in trained.pipeline.slots if slot.what == "forward"]
    assert len(forwards) == 4 * (chunks or (2 if schedule == "zbv" else 1))


@on_ranks(4)
def test_units_may_be_named_of_layers_that_other_stages_have(world: World) -> None:
    units = {"tiles": {"layers.2.wide": 2, "layers.5.narrow": 4}, "leaf_modules": ["layers.3", "LayerNorm"]}
    trained = train(world.seed, 2, {"stage": 3, "units": units})
    assert_as_alone(trained, world.seed, 16)
    unit_names = {unit.name for unit in trained.engine.units}
    tiled = {name.rsplit(".tiles", 1)[0] for name in unit_names if ".tiles." in name}
    own, other = ("layers.2.wide", "layers.5.narrow")[:: 1 if trained.pipeline.is_first else -1]
    assert own in tiled and other not in tiled, unit_names
    assert ("layers.3" in unit_names) == trained.pipeline.is_first


@on_ranks(4)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduced_once_a_step(world: World, stage: int) -> None:
    config = {"stage": stage, "batch": {"gradient_accumulation_steps": 4}}
    sent = {}
    for grad_reduction in ("per_step", "per_micro_batch"):
        trained = train(world.seed, 2, config, grad_reduction=grad_reduction)
        assert_as_alone(trained, world.seed, 16)
        sent[grad_reduction] = trained.engine.traffic.last_bytes_sent["reduce_scatter"]
    layout = sum(unit.layout.numel for unit in trained.engine.units)
    assert sent["per_step"] == 4 * layout // 2  # float32, half of it to the other rank
    assert sent["per_micro_batch"] == 4 * sent["per_step"]


@on_ranks(4)
@pytest.mark.parametrize(
    "tiers", [{"optimizer": "host"}, {"optimizer": "host", "grads": "host", "params": "host"}]
)
def test_host_tiers(world: World, tiers: dict[str, Any]) -> None:
    trained = train(world.seed, 2, {"stage": 3, "gradient_clipping": 0.5, "offload": tiers})
    assert_as_alone(trained, world.seed, 16, clip=0.5)


@on_ranks(4)
def test_another_batch_size_is_another_schedule(world: World) -> None:
    trained = train(world.seed, 2, {"stage": 2})
    words = torch.randint(16, (12, 5))
    first, *_, last = (float(trained.pipeline.train_batch(words, targets=words)) for _ in range(10))
    assert last < first
    assert all(value == first for value in world.everyone(first))


@on_ranks(4)
def test_fewer_micro_batches_than_stages(world: World) -> None:
    trained = train(world.seed, 4, {"stage": 1, "gradient_clipping": 0.5}, micro_batches=2)
    assert_as_alone(trained, world.seed, 4, clip=0.5)
