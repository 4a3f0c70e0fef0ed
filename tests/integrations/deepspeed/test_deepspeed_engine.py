"""The engine and the functions around it on ranks of the pool, under DeepSpeed's names."""

from __future__ import annotations

import datetime
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import ConfigError
from zero_ext.integrations import deepspeed

STEPS = 3
ALL = 4  # deepspeed.initialize takes the world, which in the pool is all ranks


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(9, 17), nn.Tanh()),
        nn.Sequential(nn.Linear(17, 17), nn.Tanh()),
        nn.Linear(17, 5),
    )


EPS = 1e-5  # a small one turns the rounding of gradients near zero into whole steps


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def batch_of(world: World, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(world.seed + 97 * number + rank)
    return torch.randn(2, 9, generator=generator), torch.randn(2, 5, generator=generator)


def loss_of(model: nn.Module, world: World, number: int, rank: int) -> torch.Tensor:
    inputs, wanted = batch_of(world, number, rank)
    dtype = next(iter(model.parameters())).dtype
    return nn.functional.mse_loss(model(inputs.to(dtype)).float(), wanted)


class Reference:
    """AdamW by torch on all ranks' batches, fp32."""

    def __init__(self, world: World) -> None:
        self.world, self.model = world, model_of(world.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)

    def backward(self, numbers: list[int], divisor: float = 2.0) -> None:
        self.optimizer.zero_grad()
        for number in numbers:
            for rank in range(self.world.size):
                (loss_of(self.model, self.world, number, rank) / divisor / self.world.size).backward()

    def step(self, numbers: list[int], divisor: float = 2.0) -> None:
        self.backward(numbers, divisor)
        self.optimizer.step()

    def assert_alike(self, engine: nn.Module) -> None:
        state = engine.module_state_dict()
        for name, value in self.model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def engine_of(world: World, stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model_of(world.seed), config=config_of(stage, **more)
    )
    assert engine.optimizer is optimizer and loader is None
    return engine


@on_ranks(ALL)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_accumulation_loops(world: World, stage: int) -> None:
    """By the JSON's number, by boundaries that the caller sets, and under no_sync."""
    engine, reference = engine_of(world, stage), Reference(world)
    for number in range(4):
        returned = engine.backward(loss_of(engine, world, number, world.rank))
        wanted = loss_of(reference.model, world, number, world.rank).item() / 2 if number < 2 else None
        assert wanted is None or returned.item() == pytest.approx(wanted, rel=1e-5)
        assert engine.is_gradient_accumulation_boundary() == (number % 2 == 1)
        engine.step()
        assert engine.was_step_applied() == (number % 2 == 1)
    reference.step([0, 1])
    reference.step([2, 3])
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 2 * 2 * 2 * world.size)
    # Three micro-batches of a step, one more than the JSON says, and one.
    for number, last in ((4, False), (5, False), (6, True), (7, True)):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss_of(engine, world, number, world.rank), scale_wrt_gas=False)
        engine.step()
    reference.step([4, 5, 6], divisor=1)
    reference.step([7], divisor=1)
    with engine.no_sync():
        engine.backward(loss_of(engine, world, 8, world.rank))
    engine.backward(loss_of(engine, world, 9, world.rank))
    engine.step()
    reference.step([8, 9])
    reference.assert_alike(engine)
    assert engine.global_steps == 5 and engine.get_lr() == [1e-2]


@on_ranks(ALL)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_of_single_parameters(world: World, stage: int) -> None:
    engine, reference = engine_of(world, stage), Reference(world)
    utils = deepspeed.utils
    for number in (0, 1):
        engine.backward(loss_of(engine, world, number, world.rank))
    reference.backward([0, 1])
    own, theirs = dict(engine.named_parameters()), dict(reference.model.named_parameters())
    for name, parameter in own.items():
        torch.testing.assert_close(utils.safe_get_full_fp32_param(parameter), theirs[name].detach())
        torch.testing.assert_close(utils.safe_get_full_grad(parameter), theirs[name].grad)
    name = "1.0.weight"
    for value in (own[name], theirs[name]):
        doubled = theirs[name].grad * 2
        if value is own[name]:
            utils.safe_set_full_grad(value, doubled)
            torch.testing.assert_close(utils.safe_get_full_grad(value), doubled)
        else:
            value.grad = doubled
    engine.step()
    engine.step()
    reference.optimizer.step()
    reference.assert_alike(engine)
    generator = torch.Generator().manual_seed(world.seed)
    for name in ("0.0.bias", "2.weight"):
        state = reference.optimizer.state[theirs[name]]
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(utils.safe_get_full_optimizer_state(own[name], kind), state[kind])
            value = torch.rand(own[name].shape, generator=generator)
            utils.safe_set_full_optimizer_state(own[name], value, kind)
            state[kind].copy_(value)
        value = torch.randn(own[name].shape, generator=generator)
        utils.safe_set_full_fp32_param(own[name], value)
        theirs[name].data.copy_(value)
        local = utils.safe_get_local_fp32_param(own[name])
        held = 0 if local is None else local.numel()
        assert sum(world.everyone(held)) == value.numel() * (world.size if stage == 0 else 1)
    reference.assert_alike(engine)
    for number in (2, 3):
        engine.backward(loss_of(engine, world, number, world.rank))
        engine.step()
    reference.step([2, 3])
    reference.assert_alike(engine)
    with pytest.raises(ValueError, match=r"'2\.weight': expected a value of shape \(5, 17\), got \(3,\)"):
        utils.safe_set_full_fp32_param(own["2.weight"], torch.zeros(3))
    assert utils.safe_get_full_optimizer_state(own["2.weight"], "momentum_buffer") is None


@on_ranks(ALL)
def test_masters_are_read_and_set_without_rounding(world: World) -> None:
    engine = engine_of(world, 3, bf16={"enabled": True})
    parameter = dict(engine.named_parameters())["1.0.weight"]
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(world.seed))
    deepspeed.utils.safe_set_full_fp32_param(parameter, value)
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), value)
    assert torch.equal(engine.module_state_dict()["1.0.weight"], value.bfloat16())


@on_ranks(ALL)
def test_checkpoints_under_deepspeeds_names(world: World) -> None:
    folder = world.shared_folder()
    engine = engine_of(world, 3)
    assert engine.load_checkpoint(folder) == (None, {})
    state = {"epoch": 3, "best": 0.5, "order": torch.arange(5), "names": ["a", None]}

    def train(model: deepspeed.DeepSpeedEngine, first: int) -> list[float]:
        losses = []
        for number in range(first, first + 2):
            losses.append(loss_of(model, world, number, world.rank).item())
            model.backward(loss_of(model, world, number, world.rank))
            model.step()
        return losses

    train(engine, 0)
    engine.save_checkpoint(folder, client_state=state)
    after = train(engine, 2)
    engine.save_checkpoint(folder, tag="best model", save_latest=False)
    assert (folder / "latest").read_text() == "global_step1"
    other = engine_of(world, 1)
    path, client = other.load_checkpoint(folder)
    assert path == str(folder / "global_step1") and client["epoch"] == 3
    assert torch.equal(client["order"], torch.arange(5)) and client["names"] == ["a", None]
    assert (other.global_steps, other.micro_steps) == (1, 2)
    assert train(other, 2) == after
    path, client = other.load_checkpoint(folder, tag="best model")
    assert path == str(folder / "best model") and client == {} and other.global_steps == 2
    own = folder if world.rank == 0 else folder / f"rank-{world.rank}"
    with pytest.warns(RuntimeWarning, match="save to that of rank 0") if world.rank else nullcontext():
        engine.save_checkpoint(own, tag="elsewhere")
    assert other.load_checkpoint(own)[0] == str(folder / "elsewhere")
    assert not (folder / f"rank-{world.rank}").exists()
    world.barrier()
    before = sorted(item.name for item in folder.iterdir())
    with pytest.raises(TypeError, match=r"client_state\.when: a datetime\.date"):
        engine.save_checkpoint(folder, tag="x", client_state={"when": datetime.date(2026, 1, 1)})
    for tag in ("../up", "a/b", "", "..", ".hidden", "latest", "x" * 300):
        with pytest.raises(ValueError, match="expected a folder name"):
            engine.save_checkpoint(folder, tag=tag)
    assert sorted(item.name for item in folder.iterdir()) == before
    with pytest.raises(Exception, match=r"tag: .* got 'global_step7'.* best model, elsewhere, global_step1"):
        engine.load_checkpoint(folder, tag="global_step7")
    saved, rates = engine.module_state_dict(), engine.get_lr()
    for keep in ({"load_module_only": True}, {"load_optimizer_states": False}):
        fresh = engine_of(world, 1)
        train(fresh, 0)
        before_load = fresh.get_lr()
        path, client = fresh.load_checkpoint(folder, tag="best model", **keep)
        assert path == str(folder / "best model") and client == {}
        assert all(torch.equal(value, saved[name]) for name, value in fresh.module_state_dict().items())
        assert fresh.global_steps == 1
        assert fresh.get_lr() == (before_load if "load_module_only" in keep else rates)
    engine.save_16bit_model(folder / "bin")
    engine.save_16bit_model(folder / "safe", "model.safetensors")
    wanted = engine.module_state_dict()
    for values in (
        torch.load(folder / "bin" / "pytorch_model.bin"),
        load_file(folder / "safe" / "model.safetensors"),
    ):
        assert values.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in values.items())


@on_ranks(ALL)
def test_parameters_of_stage_3(world: World) -> None:
    zero = deepspeed.zero
    config = config_of(3)
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    config["train_micro_batch_size_per_gpu"] = "auto"
    with zero.Init(config_dict_or_path=config):
        model = model_of(world.seed)
    wanted = model_of(world.seed)
    sharded = list(model.parameters())
    assert all(p.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE for p in sharded)
    assert [tuple(p.ds_shape) for p in sharded] == [tuple(p.shape) for p in wanted.parameters()]
    assert sum(p.ds_numel for p in sharded) == sum(p.numel() for p in wanted.parameters())
    assert len({p.ds_id for p in sharded}) == len(sharded)
    plain = nn.Parameter(torch.full((3,), float(world.rank)))
    with torch.no_grad(), zero.GatheredParameters([model[0][0].weight, None, plain], modifier_rank=1):
        assert model[0][0].weight.ds_status is zero.ZeroParamStatus.AVAILABLE
        if world.rank == 1:
            model[0][0].weight.add_(1)
    assert torch.equal(plain, torch.ones(3))  # rank 1's
    wanted[0][0].weight.data.add_(1)
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert model[0][0].weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    built = model_of(world.seed + 1)
    zero.Init(module=built)
    unavailable = zero.ZeroParamStatus.NOT_AVAILABLE
    assert all(p.ds_status is unavailable and hasattr(p, "ds_id") for p in built.parameters())
    config["train_micro_batch_size_per_gpu"] = 2
    engine, *_ = deepspeed.initialize(model=model, config_params=config)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, wanted.state_dict()[name])
    with torch.no_grad(), zero.GatheredParameters(engine.module[2].weight, modifier_rank=0):
        if world.rank == 0:
            engine.module[2].weight.zero_()
    assert not engine.module_state_dict()["2.weight"].any()
    with zero.unwrap_model_for_generation(engine) as full_model:
        assert full_model is model and not full_model[2].weight.any()
    deepspeed.zero.register_external_parameter(model, model[2].weight)
    with pytest.raises(deepspeed.DeepSpeedFeatureError, match="mpu"):
        zero.Init(mpu=object())
    with pytest.raises(TypeError, match="got 'no_such'"):
        zero.Init(no_such=1)


@on_ranks(ALL)
def test_initialize_accepts_arguments_as_deepspeed_does(world: World) -> None:
    folder = world.shared_folder()
    path = folder / f"config-{world.rank}.json"
    path.write_text(json.dumps(config_of(2)))
    arguments = SimpleNamespace(deepspeed_config=str(path), local_rank=0)
    data = [torch.randn(9) for _ in range(40)]
    model = model_of(world.seed)
    engine, _, loader, scheduler = deepspeed.initialize(
        arguments,
        model,
        None,
        model.parameters(),
        data,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        collate_fn=torch.stack,
        dist_init_required=False,
    )
    assert next(iter(loader)).shape == (2, 9)
    assert engine.config["zero_optimization"]["stage"] == engine.zero_optimization_stage() == 2
    for number in range(2):
        engine.backward(loss_of(engine, world, number, world.rank))
        engine.step()
    assert engine.get_lr() == [5e-3] and scheduler is engine.lr_scheduler
    assert engine.get_batch_info() == (16, 2, 2)
    assert isinstance(engine.module, nn.Sequential) and engine.get_type() == ["AdamW"]
    deepspeed_adam = deepspeed.ops.adam.DeepSpeedCPUAdam(model_of(0).parameters(), weight_decay=0.1)
    assert type(deepspeed_adam) is torch.optim.AdamW
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows writes it
    marked, *_ = deepspeed.initialize(model=model_of(1), config=path, config_params=path)
    assert marked.zero_optimization_stage() == 2
    path.write_text('{"train_batch_size": 16,')
    one_bit = config_of(2, optimizer={"type": "OneBitAdam"})
    one, alone = config_of(1), {key: value for key, value in config_of(1).items() if key != "optimizer"}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "expected one configuration", {"config": None}),
        (ValueError, "expected one configuration", {"args": arguments}),
        (ValueError, "one configuration, got 2", {"config_params": config_of(2)}),
        (TypeError, "model: expected a torch.nn.Module, got .*Linear", {"model": nn.Linear}),
        (TypeError, "optimizer: .*callable.*got 'Adam'", {"optimizer": "Adam"}),
        (TypeError, "lr_scheduler: .*callable.*got 3", {"lr_scheduler": 3}),
        (ConfigError, "scheduler: ", {"config": alone | {"scheduler": {"type": "WarmupLR"}}}),
        (ConfigError, "scheduler: ", {"config": alone, "lr_scheduler": max}),
        (ConfigError, r"config-\d.json: expected JSON, got .* at line 1", {"config": path}),
        (
            ConfigError,
            "train_batch_size: .*, got 'auto'.*Write",
            {"config": one | {"train_batch_size": "auto"}},
        ),
        (ConfigError, rf"=17.* on {world.size} rank", {"config": one | {"train_batch_size": 17}}),
        (ConfigError, "zero_optimisation", {"config": {"zero_optimisation": {}}}),
        (ConfigError, "stage: expected 0 or 1 with OneBitAdam, got 2", {"config": one_bit}),
        (deepspeed.DeepSpeedFeatureError, "mpu", {"mpu": object()}),
        (TypeError, "got 'modle'", {"modle": model_of(1)}),
    ]
    for error, words, changes in cases:
        with pytest.raises(error, match=words):
            deepspeed.initialize(**{"model": model_of(1), "config": one, **changes})


@on_ranks(ALL)
def test_an_engine_without_an_optimizer_runs_the_model(world: World) -> None:
    config = config_of(3)
    del config["optimizer"]
    engine, optimizer, _, _ = deepspeed.initialize(model=model_of(world.seed), config=config)
    assert optimizer.module is engine.module and not isinstance(optimizer, torch.optim.Optimizer)
    with torch.no_grad():
        assert torch.allclose(engine(torch.ones(1, 9)), model_of(world.seed)(torch.ones(1, 9)))
    with pytest.raises(RuntimeError, match="has no optimizer"):
        engine.step()


@on_ranks(ALL)
def test_leaf_modules_and_overflow(world: World) -> None:
    model = model_of(world.seed)
    found = deepspeed.utils.set_z3_leaf_modules_by_name(model, ["1"])
    assert found == deepspeed.utils.get_z3_leaf_modules(model) == [model[1]]
    fp16 = {"enabled": True, "initial_scale_power": 4}
    engine, *_ = deepspeed.initialize(model=model, config=config_of(3, fp16=fp16))
    assert engine.zero_config.units.leaf_modules == ("1",)
    assert engine.optimizer.loss_scale == 16 and engine.dynamic_loss_scale()
    for number in range(2):
        engine.backward(loss_of(engine, world, number, world.rank) * (1e30 if number else 1))
        engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and engine.global_steps == 1
    with pytest.raises(ValueError, match="no modules of the classes"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])


@on_ranks(ALL)
def test_collectives(world: World) -> None:
    comm = deepspeed.comm
    assert comm.is_initialized() and comm.get_world_size() == ALL and comm.get_rank() == world.rank
    value = torch.full((4,), float(world.rank))
    comm.all_reduce(value, prof=True, log_name="mine", debug="here")
    assert torch.equal(value, torch.full((4,), 6.0))
    gathered = torch.empty(4)
    comm.allgather_fn(gathered, torch.tensor([float(world.rank)]))
    assert gathered.tolist() == [0, 1, 2, 3]
    comm.broadcast(gathered.mul_(world.rank), src=1)
    assert gathered.tolist() == [0, 1, 2, 3]
    assert comm.get_all_ranks_from_group() == [0, 1, 2, 3]
    comm.barrier()
    comm.init_distributed(dist_backend="gloo", verbose=False)
    with pytest.raises(TypeError, match="got 'no_such'"):
        comm.init_distributed(no_such=1)
