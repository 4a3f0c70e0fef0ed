"""What pipelines refuse, and how they end when a stage fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import WIDTH, WORDS, mean_loss, mesh_of, specifications, train
from tests.parallel.training import adamw
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule


@on_ranks(4)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 1}, r"pipeline stages: expected at most 1.* got 2"),
        ({"schedule": "2f2b"}, "schedule: expected one of gpipe, 1f1b, "),
        ({"chunks": 2}, "chunks: expected 1 per rank in schedule '1f1b', got 2"),
        ({"schedule": "zbv", "chunks": 1}, "chunks: expected 2 per rank in schedule 'zbv', got 1"),
        ({"schedule": "interleaved", "chunks": 9}, "expected at most 10, .* got 18"),
        ({"split": "fast"}, "split: expected 'parameters', 'uniform' or .*, got 'fast'"),
        ({"split": [1.0, 2.0]}, "split: expected a weight for each of the 10 layers, got 2"),
        ({"split": [1.0] * 9 + [-1.0]}, r"weight of layer 9: .* got -1\.0"),
        ({"pp": 2, "schedule": "layer_major"}, "'layer_major' runs full models, and 'pp' of the mesh is 2"),
        ({"pp": 1, "schedule": "layer_major", "chunks": 2}, "expected 1 per rank in schedule 'layer_major'"),
    ],
)
def test_modules_that_cannot_be(world: World, settings: dict[str, Any], message: str) -> None:
    layers, mesh = specifications()[: settings.pop("layers", None)], mesh_of(settings.pop("pp", 2))
    with pytest.raises(ValueError, match=message):
        PipelineModule(layers, mesh, loss=mean_loss, **settings)


@on_ranks(4)
@pytest.mark.parametrize("units", [{"tiles": {"heads": 2, "layers.2.wide": 2}}, {"leaf_modules": ["heads"]}])
def test_names_that_no_stage_has_end_on_all_of_them(world: World, units: dict[str, Any]) -> None:
    module = PipelineModule(specifications(), mesh_of(2), loss=mean_loss)
    with pytest.raises(ValueError, match=r"units\..*\['heads'\]"):
        zero_ext.prepare(module, None, {"stage": 3, "units": units}, process_group=mesh_of(2))


IN_BACKWARD = {"offload": {"update_mode": "in_backward"}}
THREE = {"batch": {"gradient_accumulation_steps": 3}}


@on_ranks(4)
@pytest.mark.parametrize(
    ("schedule", "config", "settings", "message"),
    [
        ("1f1b", {}, {"micro_batches": 0}, "micro_batches: expected an integer of at least 1, got 0"),
        ("1f1b", {}, {"micro_batches": True}, "micro_batches: expected an integer of at least 1, got True"),
        ("1f1b", {}, {"grad_reduction": "never"}, "grad_reduction: expected .*, got 'never'"),
        ("1f1b", {}, {"grad_reduction": "per_micro_batch"}, r"batch.gradient_accumulation_steps: .*\(4\)"),
        ("1f1b", THREE, {}, r"micro_batches: expected batch.gradient_accumulation_steps \(3\)"),
        (
            "1f1b",
            IN_BACKWARD,
            {},
            "offload.update_mode: expected 'after_backward' or 'delayed' in a pipeline",
        ),
        ("1f1b", {}, {"checkpoint": True}, "checkpoint: expected None in schedule '1f1b', .* got True"),
        ("layer_major", {}, {"grad_reduction": "per_micro_batch"}, "grad_reduction: expected 'per_step' in"),
    ],
)
def test_settings_that_do_not_fit(
    world: World, schedule: str, config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    mesh = mesh_of(1 if schedule == "layer_major" else 2)
    module = PipelineModule(specifications(), mesh, loss=mean_loss, schedule=schedule)
    model, _ = zero_ext.prepare(module, adamw(module), {"stage": 2, **config}, process_group=mesh)
    with pytest.raises(ValueError, match=message):
        Pipeline(model, **{"micro_batches": 4, **settings})


def test_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match="module: expected a prepared PipelineModule, got Linear"):
        Pipeline(nn.Linear(1, 1), micro_batches=1)


@on_ranks(4)
def test_batches_that_do_not_divide_are_refused_by_all_stages(world: World) -> None:
    trained = train(world.seed, 2, {"stage": 2}, steps=1)
    pipeline, good = trained.pipeline, torch.zeros(8, 5, dtype=torch.int64)
    for words, targets, own in (
        (good[:6], good[:6], "expected a batch that divides into 4 micro-batches, got shape (6, 5)"),
        (good, good[:7], "targets: expected a batch that divides into 4 micro-batches, got shape (7, 5)"),
        (good, None, "batch: expected targets on a rank with a stage that reads them, got none"),
        (None, good, "batch: expected inputs on a rank with a stage that reads them, got none"),
        ("text", good, "inputs: expected a tensor [batch, ...], got str"),
    ):
        with pytest.raises(ValueError, match="batch") as caught:
            pipeline.train_batch(*([] if words is None else [words]), targets=targets)
        messages = world.everyone(str(caught.value))
        assert any(own in each for each in messages), messages
        assert all(own in each or "another stage of the pipeline" in each for each in messages)
    # Nothing was sent, and nothing has changed.
    assert torch.isfinite(pipeline.train_batch(good, targets=good))


class Failing(nn.Module):
    """Raises at a call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.call, self.calls = call, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise ArithmeticError("the layer gave up")
        return hidden * self.weight


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_stage_that_fails_ends_the_step_on_all_ranks(world: World, stage: int) -> None:
    ends = LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS)
    layers = [ends[0], LayerSpec(Failing, 5), ends[1]]
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(world.seed, 2, {"stage": stage, "timeout_seconds": 60}, layers=layers, split="uniform")
    assert time.monotonic() - began < 50  # not the time-out
    messages = world.everyone(str(caught.value))
    assert any("the layer gave up" in each for each in messages)
    assert all("stopped" in each for each in messages), messages


@on_ranks(4)
def test_overflow_is_agreed_on_by_all_stages(world: World) -> None:
    config = {"stage": 2, "precision": {"dtype": "fp16"}, "loss_scale": {"initial_power": 24}}
    trained = train(world.seed, 2, config, steps=3)
    skipped = world.everyone(trained.engine.skipped_steps)
    assert skipped[0] > 0
    assert len(set(skipped)) == 1
    assert len(set(world.everyone(trained.engine.optimizer_step.scaler.scale))) == 1
    config["loss_scale"] = {"initial_power": 8}
    trained = train(world.seed, 2, config, steps=3)
    assert trained.engine.skipped_steps == 0
    assert trained.losses[0] > trained.losses[-1] or all(torch.isfinite(torch.tensor(trained.losses)))


@on_ranks(4)
def test_gradients_that_are_not_finite_end_the_step_on_all_stages(world: World) -> None:
    trained = train(world.seed, 2, {"stage": 2, "gradient_clipping": 1.0}, steps=1)
    module = trained.pipeline._module
    own = module.loss

    def broken(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return own(scores, words) * float("nan")

    module.loss = broken
    words = torch.zeros(8, 5, dtype=torch.int64)
    with pytest.raises(FloatingPointError, match="No parameter or optimizer state was changed"):
        trained.pipeline.train_batch(words, targets=words)
