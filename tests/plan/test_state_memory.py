"""The memory formulas against the published figures and against bytes counted tensor by tensor."""

from __future__ import annotations

import math
import random

import pytest
import torch

from zero_ext.plan import StateBytes, TrainingState, model_state_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_the_published_example_of_7_5_billion_parameters_on_64_ranks() -> None:
    state = TrainingState({"fp16": 7_500_000_000})
    gigabytes = [model_state_bytes(stage, 64, state).total / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.003)


def allocate(stage: int, world_size: int, state: TrainingState, no_sync: bool) -> StateBytes:
    """Makes one rank's tensors (without memory) by the definition of the stages, and adds up their bytes."""

    def share(elements: int, first_sharded_stage: int) -> int:
        return -(-elements // world_size) if stage >= first_sharded_stage and world_size > 1 else elements

    kinds: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "optimizer": []}

    def keep(kind: str, elements: int, dtype: torch.dtype) -> None:
        kinds[kind].append(torch.empty(elements, dtype=dtype, device="meta"))

    for name, elements in state.frozen.items():
        keep("params", share(elements, 3), DTYPES[name])
    for name, elements in state.trainable.items():
        keep("params", share(elements, 3), DTYPES[name])
        summed = DTYPES[state.grad_accum_dtype]
        keep("grads", share(elements, 2), summed if state.accumulation_steps > 1 else DTYPES[name])
        if no_sync and stage >= 2 and world_size > 1:
            keep("grads", elements, summed)
        if name != "fp32":
            keep("optimizer", share(elements, 1), torch.float32)
        for _ in range(state.moments):
            if state.moments_dtype == "8bit":
                keep("optimizer", share(elements, 1), torch.uint8)
                keep("optimizer", math.ceil(share(elements, 1) / 256), torch.float32)
            else:
                keep("optimizer", share(elements, 1), DTYPES[state.moments_dtype])
    return StateBytes(**{kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()})


def test_formula_equals_bytes_counted_tensor_by_tensor() -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(400):
        state = TrainingState(
            {name: draw.randrange(10**6) for name in draw.sample(sorted(DTYPES), draw.randint(1, 3))},
            {name: draw.randrange(10**6) for name in draw.sample(sorted(DTYPES), draw.randint(0, 3))},
            moments=draw.randint(0, 3),
            moments_dtype=draw.choice(["fp32", "bf16", "8bit"]),
            grad_accum_dtype=draw.choice(["fp32", "bf16"]),
            accumulation_steps=draw.randint(1, 3),
        )
        stage, world_size, no_sync = draw.randrange(4), draw.choice([1, 2, 3, 4, 64]), draw.random() < 0.5
        found = model_state_bytes(stage, world_size, state, no_sync=no_sync)
        assert found == allocate(stage, world_size, state, no_sync), (stage, world_size, state, no_sync)
        assert found.total == found.params + found.grads + found.optimizer


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(0, (2, 2, 12)), (1, (2, 2, 3)), (2, (2, 0.5, 3)), (3, (0.5, 0.5, 3))]
)
def test_mixed_precision_adam_on_four_ranks(stage: int, bytes_per_parameter: tuple[float, ...]) -> None:
    found = model_state_bytes(stage, 4, TrainingState({"bf16": 1000}))
    assert (found.params, found.grads, found.optimizer) == tuple(
        1000 * width for width in bytes_per_parameter
    )


@pytest.mark.parametrize("stage", [-1, 4, "3", None])
def test_unknown_stages_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="stage"):
        model_state_bytes(stage, 2, TrainingState({"bf16": 8}))


@pytest.mark.parametrize("world_size", [0, -2, 1.5, True])
def test_impossible_world_sizes_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        model_state_bytes(3, world_size, TrainingState({"bf16": 8}))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"trainable": {"int8": 4}}, "trainable: expected one of fp32, bf16, fp16, got 'int8'"),
        ({"trainable": {"bf16": -4}}, r"trainable\['bf16'\]: expected .*, got -4"),
        ({"frozen": {"bf16": 1.5}}, r"frozen\['bf16'\]: expected .*, got 1.5"),
        ({"moments": -1}, "moments: expected .*, got -1"),
        ({"moments_dtype": "fp64"}, "moments_dtype: expected .*, got 'fp64'"),
        ({"grad_accum_dtype": "fp64"}, "grad_accum_dtype: expected .*, got 'fp64'"),
        ({"accumulation_steps": 0}, "accumulation_steps: expected .*, got 0"),
    ],
)
def test_impossible_states_are_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TrainingState(**{"trainable": {"bf16": 8}, **arguments})
