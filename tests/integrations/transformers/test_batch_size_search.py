"""``auto_find_batch_size``: what an out-of-memory error leads to, compared with the plain Trainer."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.integrations.transformers.models import (
    Sentences,
    arguments,
    column,
    enter,
    fitted,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers import ZeroTrainer
from zero_ext.zero import engine_of

MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
LARGEST = 5
IN_BACKWARD = {"params": "host", "grads": "host", "optimizer": "host", "update_mode": "in_backward"}
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "in backward": {"stage": 3, "offload": IN_BACKWARD},
}


class OutOfMemory(torch.autograd.Function):
    """Raises what torch's allocator raises, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, phase: str) -> torch.Tensor:
        if phase == "forward":
            raise RuntimeError(MESSAGE)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(MESSAGE)


def on_small_device(kind: type, phase: str, first: int = 1) -> Any:
    """A trainer class that runs out of memory over more than ``LARGEST`` samples, from micro-batch ``first``
    on."""

    class Small(kind):  # type: ignore[misc]
        micro_batches = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.micro_batches += 1
            hook = None
            if self.micro_batches >= first and len(inputs["input_ids"]) > LARGEST:
                last = self.model.model.layers[1].mlp
                hook = last.register_forward_hook(lambda *call: OutOfMemory.apply(call[2], phase))
            try:
                return super().training_step(model, inputs, *args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()

    return Small


@contextlib.contextmanager
def cheap_garbage_collection() -> Iterator[None]:
    """Accelerate collects garbage at every try, which takes long where much is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


SETTINGS: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2}
SEARCHED = {**SETTINGS, "per_device_train_batch_size": 6, "auto_find_batch_size": True}


@on_ranks(1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_rank_trains_with_the_batch_that_fits(world: World, phase: str) -> None:
    enter(world)
    data, small = Sentences(60, 1), {**SETTINGS, "per_device_train_batch_size": LARGEST}
    folder = world.shared_folder()
    with cheap_garbage_collection():
        for name, config in CONFIGS.items():
            wanted = fitted(ZeroTrainer, llama(1), folder, data, config, **small)
            found = fitted(on_small_device(ZeroTrainer, phase), llama(1), folder, data, config, **SEARCHED)
            assert column(found, "loss") == column(wanted, "loss"), name
            assert found.state.train_batch_size == LARGEST
            memory, expected = (engine_of(each.model).memory_by_tier() for each in (found, wanted))
            assert memory == expected, name


@on_ranks(1)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_later_error_goes_on_from_the_weights_as_in_the_plain_trainer(world: World, phase: str) -> None:
    enter(world)
    kinds = ((Trainer, None), *((ZeroTrainer, config) for config in CONFIGS.values()))
    folder = world.shared_folder()
    with cheap_garbage_collection():
        plain, *sharded = (
            fitted(on_small_device(kind, phase, 4), llama(1), folder, Sentences(60, 1), config, **SEARCHED)
            for kind, config in kinds
        )
    for trainer in sharded:
        assert engine_of(trainer.model).steps == 5  # one with the large batch, then all with the small one
        assert largest_difference(column(trainer, "loss"), column(plain, "loss")) < 1e-5
        assert column(trainer, "learning_rate") == column(plain, "learning_rate")


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_of_several_ranks_ends_training_on_all(world: World, stage: int, phase: str) -> None:
    enter(world)
    kind = on_small_device(ZeroTrainer, phase, 2) if world.rank else ZeroTrainer
    folder = world.shared_folder()
    with cheap_garbage_collection():
        config = {"stage": stage, "timeout_seconds": 60.0}
        with pytest.raises(RuntimeError, match=r"rank 1: expected a batch of 6.*smaller per_device_train_"):
            fitted(kind, llama(1), folder, Sentences(60, 1), config, **SEARCHED)


def test_a_model_that_does_not_fit_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def placed(*args: Any, **kwargs: Any) -> Any:
        tries.append(args)
        raise torch.OutOfMemoryError("prepare: out of memory (CUDA out of memory. Tried to allocate).")

    monkeypatch.setattr("zero_ext.integrations.transformers.trainer.prepare", placed)
    args = arguments(tmp_path, **SEARCHED)
    with pytest.raises(MemoryError, match="prepare: out of memory"):
        ZeroTrainer(model=llama(1), args=args, train_dataset=Sentences(60, 1)).train()
    assert len(tries) == 1
