"""The layer-major schedule: all micro-batches through a layer before the next one."""

from __future__ import annotations

import pytest

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.stages import train
from tests.parallel.pipeline.test_training import assert_as_alone


@on_ranks(4)
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_are_those_of_one_process(world: World, stage: int, checkpoint: bool) -> None:
    trained = train(
        world.seed,
        1,
        {"stage": stage, "gradient_clipping": 0.5},
        schedule="layer_major",
    )
    assert_as_alone(trained, world.seed, 8 * 4, clip=0.5)
