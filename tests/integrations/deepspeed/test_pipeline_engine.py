"""Pipelines by DeepSpeed's names on ranks of the pool: as one process in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.pipeline_model import (
    BLOCKS,
    MICRO_BATCHES,
    SAMPLES,
    Alone,
    Plain,
    config_of,
    engine_of,
    full_values,
    layers,
    loss_fn,
    micro_batch,
    micro_batches,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.pipeline_module import PipelineModule

ALL = 4  # a pipeline takes the world, which in the pool is all ranks


@on_ranks(ALL, by_turns=True)
@pytest.mark.parametrize(("num_stages", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (1, 3)])
def test_steps_are_those_of_one_process(world: World, num_stages: int, stage: int) -> None:
    engine = engine_of(stage, num_stages)
    alone = Alone(full_values(world, engine), world.seed, ALL // num_stages)
    batches = micro_batches(engine, world.seed)
    for step in range(3):
        (rate,) = engine.get_lr()
        loss = engine.train_batch(batches if step == 0 else None)
        assert float(loss) == pytest.approx(alone.step(rate), rel=1e-5)
    assert len(set(world.everyone(float(loss)))) == 1
    evaluated = engine.eval_batch(micro_batches(engine, world.seed, first=7))
    assert float(evaluated) == pytest.approx(float(alone.mean_loss(7).detach()), rel=1e-5)
    for name, value in full_values(world, engine).items():
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert engine.get_lr() != [rate] and engine.was_step_applied()
    assert (engine.global_steps, engine.micro_steps) == (3, 3 * MICRO_BATCHES)
    assert engine.get_batch_info() == (ALL // num_stages * SAMPLES * MICRO_BATCHES, SAMPLES, MICRO_BATCHES)


@on_ranks(ALL)
def test_what_is_asked_of_an_engine(world: World) -> None:
    engine = engine_of(1)
    assert (engine.num_stages, engine.stage_id) == (2, world.rank // 2)
    assert engine.get_pipeline_parallel_rank() == engine.module.stage_id == engine.stage_id
    assert (engine.is_first_stage(), engine.is_last_stage()) == (engine.stage_id == 0, engine.stage_id == 1)
    assert (engine.micro_batches, engine.micro_batch_size) == (MICRO_BATCHES, SAMPLES)
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (world.rank, ALL, 2)
    assert engine.get_data_parallel_rank() == world.rank % 2
    groups = deepspeed.utils.groups
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (2, world.rank % 2)
    assert torch.distributed.get_process_group_ranks(groups.get_data_parallel_group()) == [
        engine.stage_id * 2,
        engine.stage_id * 2 + 1,
    ]
    assert groups._get_data_parallel_group_ranks() == [engine.stage_id * 2, engine.stage_id * 2 + 1]
    assert groups._get_broadcast_src_rank() == engine.stage_id * 2
    assert engine.pipeline_parallelism and not hasattr(engine, "grid")
    with pytest.raises(
        deepspeed.DeepSpeedFeatureError, match=r"engine\.grid: .* Use the module's mesh.*module\.mesh"
    ):
        engine.grid  # noqa: B018
    for refused in (engine, engine.forward, engine.backward, engine.step, engine.coalesce_grad_reduction):
        with pytest.raises(RuntimeError, match=r"full batches\. Call engine\.train_batch"):
            refused()
    with pytest.raises(deepspeed.DeepSpeedFeatureError, match="zero-ext export"):
        engine.save_16bit_model("nowhere")
    world.barrier()  # nothing above waits for a rank that still connects to the engine's groups


@on_ranks(ALL)
def test_outputs_of_an_evaluation(world: World) -> None:
    engine = engine_of(3)
    model, training = Plain(full_values(world, engine)), micro_batches(engine, world.seed)
    engine.set_dataiterator(training)
    first_batch = MICRO_BATCHES * (engine.get_data_parallel_rank() + 2 * 4)
    with torch.no_grad():
        wanted = [model(micro_batch(world.seed, first_batch + number)[0]) for number in range(MICRO_BATCHES)]
    loss, logits = engine.eval_batch(micro_batches(engine, world.seed, first=4), return_logits=True)
    outputs = engine.eval_batch(
        micro_batches(engine, world.seed, first=4), compute_loss=False, reduce_output=None
    )
    if engine.is_last_stage():
        torch.testing.assert_close(outputs, wanted)
        torch.testing.assert_close(logits, wanted[-1])
    else:
        assert outputs is None and logits is None
    assert engine.data_iterator is training and torch.isfinite(loss)
    for asked in ({"num_micro_batches": 1}, {"reduce_output": None}, {"compute_loss": False}):
        with pytest.raises(deepspeed.DeepSpeedFeatureError, match=r"eval_batch: "):
            engine.eval_batch(training, **asked)


@on_ranks(ALL)
@pytest.mark.parametrize("checkpointable", [None, ["Block"], ["Words"]])
def test_layers_that_run_again(world: World, checkpointable: list[str] | None) -> None:
    options = {"activation_checkpoint_interval": 2, "checkpointable_layers": checkpointable}
    engine = engine_of(2, partition_method="uniform", **options)  # the stages have layers 0 to 2 and 3 to 5
    alone = Alone(full_values(world, engine), world.seed, 2)
    (rate,) = engine.get_lr()
    assert float(engine.train_batch(micro_batches(engine, world.seed))) == pytest.approx(
        alone.step(rate), rel=1e-5
    )
    again = {None: range(1, BLOCKS + 1), "Block": (2, 3, 4), "Words": ()}[
        checkpointable[0] if checkpointable else None
    ]
    for number, layer in engine.module.layers.items():
        if 1 <= int(number) <= BLOCKS:
            assert layer.calls == MICRO_BATCHES * (1 + (int(number) in again)), number


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4 * SAMPLES * MICRO_BATCHES

    def __getitem__(self, index: int) -> Any:
        inputs, labels = micro_batch(0, index, samples=1)
        return tuple(each[0] for each in inputs), tuple(each[0] for each in labels)


@on_ranks(ALL)
@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (4, 1)), ((4, 3), (2, 3))])
def test_a_checkpoint_goes_on_with_other_stages(
    world: World, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    folder = world.shared_folder()
    # As many samples a step in both.
    first, then = (
        engine_of(
            stage,
            num_stages,
            training_data=Samples(),
            config={"train_micro_batch_size_per_gpu": num_stages // 2},
        )
        for num_stages, stage in (saved, loaded)
    )
    for _ in range(5):  # into the second epoch
        first.train_batch()
    first.save_checkpoint(folder, client_state={"seen": 5})
    wanted = [float(first.train_batch()) for _ in range(2)]
    then.train_batch()
    path, client = then.load_checkpoint(folder)
    assert path is not None and path.endswith("global_step5") and client == {"seen": 5}
    assert [float(then.train_batch()) for _ in range(2)] == pytest.approx(wanted, rel=1e-5)
    assert (then.global_steps, then.micro_steps, then.get_lr()) == (7, 7 * MICRO_BATCHES, first.get_lr())
    own = micro_batches(then, world.seed)
    then.set_dataiterator(own)
    then.load_checkpoint(folder)
    assert then.data_iterator is own


@on_ranks(ALL)
def test_data_that_cannot_be_used_is_refused_by_all_ranks(world: World) -> None:
    engine = engine_of(2)
    before = full_values(world, engine)
    good = micro_batch(world.seed, 0)
    words, mask = good[0]
    smaller = ((words[:1], mask[:1]), good[1])
    for text, data in (
        ("data: expected an iterator", None),
        ("data: expected an iterator, got list. Pass iter(loader)", [good] * 3),
        ("expected 3 micro-batches, got 1 before the iterator ended", iter([good])),
        ("micro-batch: expected a pair of inputs and labels, got dict", iter([{}])),
        ("inputs: expected tensors [samples, ...], got str", iter([("text", good[1])] * 3)),
        ("a tensor without dimensions", iter([(mask.sum(), good[1])] * 3)),
        ("2: expected shapes [(2, 5), (2, 5)] as of the first, got [(1, 5)", iter([good, good, smaller])),
    ):
        engine.set_dataiterator(None)
        with pytest.raises(RuntimeError, match="reading a batch failed") as caught:
            # Of one replica alone; the other's data is good.
            engine.train_batch(data if engine.get_data_parallel_rank() == 0 else iter([good] * 3))
        assert any(text in message for message in world.everyone(str(caught.value))), text
    with pytest.raises(RuntimeError, match=r"reading a batch failed.*data: expected an iterator"):
        engine.eval_batch(None)
    with torch.no_grad(), pytest.raises(RuntimeError, match="call eval_batch"):
        engine.train_batch(iter([good] * 3))
    assert all(torch.equal(value, before[name]) for name, value in full_values(world, engine).items())
    engine.set_batch_fn(lambda batch: (batch["inputs"], batch["labels"]))
    engine.set_dataloader([{"inputs": good[0], "labels": good[1]}] * 3)
    model = Plain(before)
    assert float(engine.train_batch()) == pytest.approx(
        float(loss_fn(model(good[0]), good[1]).detach()), rel=1e-5
    )


@on_ranks(ALL)
def test_an_engine_without_an_optimizer_evaluates(world: World) -> None:
    config = {key: value for key, value in config_of(3).items() if key not in ("optimizer", "scheduler")}
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    alone = Alone(full_values(world, engine), world.seed, 2)
    loss = engine.eval_batch(micro_batches(engine, world.seed))
    assert float(loss) == pytest.approx(float(alone.mean_loss(0).detach()), rel=1e-5)
    with pytest.raises(RuntimeError, match="this engine has no optimizer"):
        engine.train_batch(micro_batches(engine, world.seed))


def mean_square(found: torch.Tensor) -> torch.Tensor:
    return (found**2).mean()


@on_ranks(ALL)
def test_the_last_layer_may_return_the_loss(world: World) -> None:
    engine = engine_of(2, layers=[*layers(), mean_square])
    engine.module.loss_fn = None
    model = Plain(full_values(world, engine))
    (inputs, _), *_ = batch = [micro_batch(world.seed, 0)] * MICRO_BATCHES
    wanted = float(mean_square(model(inputs)).detach())
    assert float(engine.eval_batch(iter(batch))) == pytest.approx(wanted, rel=1e-5)
    losses = [float(engine.train_batch(iter(batch))) for _ in range(3)]
    assert losses[0] == pytest.approx(wanted, rel=1e-5) and losses[2] < wanted
