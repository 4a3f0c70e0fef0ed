"""ZeroFabricStrategy: the loops of Fabric's DDPStrategy, several models, precisions, checkpoints, names."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from safetensors.torch import save_file
from torch import nn

import zero_ext
from tests.integrations.lightning.modules import Language, enter, largest_difference
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import distance
from zero_ext.checkpoint import inspect_checkpoint
from zero_ext.config.events import Event, ReduceEvent
from zero_ext.integrations.lightning import ZeroFabricStrategy, ZeroStrategy
from zero_ext.zero import engine_of

MODULE = "tests.integrations.lightning.test_fabric"
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
NVME = {"params": "nvme", "optimizer": "nvme"}
SCALE = {"loss_scale": {"initial_power": 8}}  # so that no step is skipped and the curves compare


def fabric(world: World, strategy: Any, **arguments: Any) -> Fabric:
    enter(world)
    made = Fabric(accelerator="cpu", devices=world.size, strategy=strategy, **arguments)
    made.launch()
    return made


class Loop:
    """A tiny language model set up with a fabric, an optimizer and a schedule."""

    def __init__(
        self, made: Fabric, seed: int, sharded_init: bool = False, module_first: bool = False
    ) -> None:
        self.fabric, self.seed, self.module_first = made, seed, module_first
        torch.manual_seed(seed)
        with made.init_module() if sharded_init else contextlib.nullcontext():
            plain = TinyModel(tied=True)
        if module_first:
            self.model = made.setup_module(plain)
            self.optimizer: Any = made.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=0.01))
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        else:
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
            self.model, self.optimizer, self.schedule = made.setup(plain, optimizer, scheduler=schedule)
        self.found: list[float] = []  # losses and norms

    def step(self, number: int) -> None:
        for micro in range(2):
            with self.fabric.no_backward_sync(self.model, enabled=micro == 0):
                ids = language_batch(self.seed, number, micro, self.fabric.global_rank)
                loss = language_loss(self.model, ids)
                self.fabric.backward(loss)
            self.found.append(loss.item())
        self.found.append(self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.05).item())
        self.optimizer.step()
        self.schedule.step()
        (self.model if self.module_first else self.optimizer).zero_grad()

    def train(self, steps: int, first: int = 0) -> Loop:
        for number in range(first, first + steps):
            self.step(number)
        return self


@on_ranks(2)
def test_a_loop_is_that_of_ddp_in_every_stage_and_tier(world: World) -> None:
    plain = Loop(fabric(world, "ddp"), world.seed).train(4)
    with tempfile.TemporaryDirectory() as folder:
        cases: tuple[tuple[Any, dict[str, Any]], ...] = (
            (ZeroFabricStrategy(1), {"module_first": True}),
            ("zero_ext_stage_2", {}),
            (ZeroFabricStrategy(config={"stage": 3}), {"module_first": True, "sharded_init": True}),
            (ZeroFabricStrategy(3, {"offload": HOST}), {"sharded_init": True}),
            (ZeroFabricStrategy(3, {"offload": {**NVME, "nvme_paths": [folder]}}), {}),
        )
        for strategy, arguments in cases:
            made = fabric(world, strategy)
            loop = Loop(made, world.seed, **arguments)
            module, engine = loop.model.module, engine_of(loop.model.module)
            assert type(module) is TinyModel and engine.world_size == 2
            reductions: Counter[str] = Counter()
            engine.subscribe(partial(count_reductions, reductions))
            loop.train(4)
            assert set(reductions.values()) == {4}  # once a step of two micro-batches
            assert largest_difference(loop.found, plain.found) < 1e-5, engine.config
            assert distance(zero_ext.full_state_dict(module), plain.model.module.state_dict()) < 1e-4
            assert all(unit.placement.params == (engine.config.stage == 3) for unit in engine.units)
            assert made.all_reduce(torch.tensor(1.0 + world.rank), reduce_op="sum").item() == 3
        with made.init_module():
            model = TinyModel()
    with torch._C.DisableTorchFunctionSubclass():
        held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert held < sum(parameter.nbytes for parameter in model.parameters()) / 10


def count_reductions(found: Counter[str], event: Event) -> None:
    if isinstance(event, ReduceEvent):
        found[event.unit] += 1


class Scorer(nn.Module):
    """Scores what the generator makes, in a method that is marked as a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).mean()


def adversarial(world: World, strategy: Any, **arguments: Any) -> tuple[list[float], list[nn.Module]]:
    made = fabric(world, strategy, **arguments)
    torch.manual_seed(world.seed)
    plain = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), Scorer())
    rates = (0.01, 0.02)
    (generator, first), (scorer, second) = (
        made.setup(each, torch.optim.Adam(each.parameters(), lr=rate))
        for each, rate in zip(plain, rates, strict=True)
    )
    scorer.mark_forward_method("score")
    torch.manual_seed(world.seed + world.rank)
    losses = []
    for _ in range(4):
        real, noise = torch.randn(5, 4) + 1, torch.randn(5, 3)
        second.zero_grad()
        loss = scorer.score(generator(noise).detach()) - scorer.score(real)
        made.backward(loss, model=scorer)
        second.step()
        first.zero_grad()
        scorer.requires_grad_(not arguments)  # no loss scale is right for two models
        other = -scorer.score(generator(noise))
        made.backward(other, model=generator)
        first.step()
        scorer.requires_grad_(True)
        losses += [loss.item(), other.item()]
    with (
        pytest.raises(ValueError, match="expected the argument model")
        if "16" in str(arguments)
        else (contextlib.nullcontext())
    ):
        made.backward(scorer.score(generator(noise)))
    return losses, list(plain)


@on_ranks(2)
def test_two_models_and_their_optimizers_are_those_of_ddp(world: World) -> None:
    wanted, plain = adversarial(world, "ddp")
    for stage in (2, 3):
        found, modules = adversarial(world, ZeroFabricStrategy(stage))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        for one, other in zip(modules, plain, strict=True):
            assert distance(zero_ext.full_state_dict(one), other.state_dict()) < 1e-4
    found, _ = adversarial(world, ZeroFabricStrategy(3, SCALE), precision="16-true")
    assert found == pytest.approx(wanted, rel=0.05, abs=0.05)


@on_ranks(1)
def test_precisions_train_in_their_dtype_with_fp32_masters(world: World) -> None:
    plain = Loop(fabric(world, "ddp"), world.seed).train(4)
    for precision, config in (("bf16-true", {}), ("bf16-mixed", {}), ("16-true", SCALE)):
        loop = Loop(fabric(world, ZeroFabricStrategy(3, config), precision=precision), world.seed).train(4)
        dtypes = {parameter.dtype for parameter in loop.model.parameters()}
        assert dtypes == {torch.float16 if precision == "16-true" else torch.bfloat16}
        assert loop.model(torch.zeros(1, 5, dtype=torch.int64)).dtype is torch.float32
        assert largest_difference(loop.found, plain.found) < 0.1, precision
        assert loop.optimizer.skipped_steps == 0 and engine_of(loop.model.module).steps == 4


@on_ranks(1)
def test_a_lightning_module_and_a_model_without_an_optimizer(world: World) -> None:
    made = fabric(world, ZeroFabricStrategy(2))
    module = Language(world.seed)
    plain = Language(world.seed)
    model, _ = made.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    ids = language_batch(world.seed, 0, 0, 0)
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        model.loss_of([ids])
    model.mark_forward_method("loss_of")
    assert model.loss_of([ids]).item() == pytest.approx(plain.loss_of([ids]).item(), rel=1e-5)
    alone = made.setup(plain.build())
    assert torch.allclose(alone(ids), plain.model(ids), rtol=1e-5)  # type: ignore[misc]
    assert engine_of(alone.module).optimizer_step.stepper is None


@on_ranks(2)
def test_ranks_evaluate_with_the_same_buffers(world: World) -> None:
    made = fabric(world, ZeroFabricStrategy(1))
    torch.manual_seed(world.seed)
    own = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = made.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(world.rank))
    made.backward(model(inputs).square().sum())
    optimizer.step()
    own.eval()
    with torch.no_grad():
        outputs = world.everyone(model(torch.ones(2, 4)).tolist())
    assert outputs[0] == outputs[1]


@on_ranks(1)
def test_evaluation_sees_delayed_updates(world: World) -> None:
    delayed = {"offload": {**HOST, "update_mode": "delayed"}}
    loop = Loop(fabric(world, ZeroFabricStrategy(3, delayed)), world.seed).train(2)
    updates = engine_of(loop.model.module).updates
    assert updates.in_progress
    loop.model.eval()(language_batch(world.seed, 0, 0, 0))
    assert not updates.in_progress


def save(world: World, folder: str) -> list[float]:
    """Two steps, a checkpoint that replaces one of more steps, two steps more."""
    loop = Loop(fabric(world, ZeroFabricStrategy(3)), world.seed)
    path, scorer = Path(folder) / "run", loop.fabric.setup(Scorer())
    state = {"model": loop.model, "optimizer": loop.optimizer, "scorer": scorer, "schedule": loop.schedule}
    loop.train(2).fabric.save(path, {"model": loop.model, "old": 1})
    loop.fabric.save(path, {**state, "epoch": 3, "seen": {"a": 1, "b": torch.ones(2)}})
    filters = {"model": lambda name, value: "norm" in name, "seen": lambda name, value: name == "a"}
    other = {"model": loop.model, "seen": {"a": 1, "b": 2}}
    loop.fabric.save(Path(folder) / "filtered", other, filter=filters)
    return loop.train(2, first=2).found[6:]


def go_on(world: World, folder: str, seed: int, stage: int) -> list[float]:
    """The two steps more, from the checkpoint at this world size and stage."""
    made = fabric(world, ZeroFabricStrategy(stage))
    loop, scorer = Loop(made, seed), made.setup(Scorer())
    state = {"model": loop.model, "optimizer": loop.optimizer, "scorer": scorer, "schedule": loop.schedule}
    state["epoch"] = 0
    torch.nn.init.zeros_(scorer.layers[0].bias)
    rest = made.load(Path(folder) / "run", state)
    assert state["epoch"] == 3 and list(rest) == ["seen"] and torch.equal(rest["seen"]["b"], torch.ones(2))
    assert loop.schedule.last_epoch == engine_of(loop.model.module).steps == 2
    check_weights_alone(made, folder, zero_ext.full_state_dict(loop.model.module))
    return loop.train(2, first=2).found


def check_weights_alone(made: Fabric, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Weights alone: of a filtered checkpoint, into a model that was built empty, and of a raw file."""
    assert made.load(Path(folder) / "filtered") == {"seen": {"a": 1}}
    with made.init_module(empty_init=True):
        empty = TinyModel(tied=True)
    model = made.setup_module(empty)
    state = {"model": model, "missing": 5}
    made.load(Path(folder) / "filtered", state, strict=False)
    assert state["missing"] == 5
    for name, value in zero_ext.full_state_dict(empty).items():
        assert torch.equal(value, weights[name] if "norm" in name else torch.zeros_like(value)), name
    made.load(Path(folder) / "run", {"model": model})
    assert distance(zero_ext.full_state_dict(empty), weights) == 0
    if made.global_rank == 0:
        save_file({name: 2 * value for name, value in weights.items()}, Path(folder) / "raw.safetensors")
    made.barrier()
    made.load_raw(Path(folder) / "raw.safetensors", model)
    assert torch.equal(zero_ext.full_state_dict(empty)["norm.weight"], 2 * weights["norm.weight"])
    made.barrier()


def test_checkpoints_go_on_bit_by_bit_and_at_other_world_sizes(rank_pool: Any, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    wanted = rank_pool.run(2, f"{MODULE}:save", {"folder": str(tmp_path)}, seed=seed)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model", "scorer"]
    assert inspect_checkpoint(tmp_path / "run" / "model").world_size == 2
    suffixes = {path.suffix for path in (tmp_path / "run").rglob("*/step-*/*")}
    assert suffixes == {".safetensors", ".json"}
    arguments = {"folder": str(tmp_path), "seed": seed}
    assert rank_pool.run(2, f"{MODULE}:go_on", {**arguments, "stage": 3}) == wanted
    alone = rank_pool.run(1, f"{MODULE}:go_on", {**arguments, "stage": 1})[0]
    assert alone[:2] == pytest.approx(wanted[0][:2], rel=1e-5)


@on_ranks(1)
def test_bad_input_is_refused(world: World) -> None:
    made = fabric(world, ZeroFabricStrategy(3))
    loop = Loop(made, world.seed)
    model, optimizer = loop.model, loop.optimizer
    plain, parameters = nn.Linear(2, 2), list(loop.model.parameters())
    second = torch.optim.SGD(plain.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        made.save(path, {"model": model})
        (Path(folder) / "file").touch()
        cases: tuple[tuple[str, Any, tuple[Any, ...], dict[str, Any]], ...] = (
            ("got 2", made.setup, (plain, second, second), {}),
            ("got others", made.setup_optimizers, (second,), {}),
            ("a second one", made.setup_optimizers, (torch.optim.SGD(parameters, lr=0.1),), {}),
            ("expected max_norm", made.clip_gradients, (model, optimizer), {"clip_val": 1.0}),
            ("expected a model", made.save, (path, {"epoch": 1}), {}),
            ("the model of the optimizer", made.save, (path, {"optimizer": optimizer}), {}),
            ("a folder can have", made.save, (path, {"../model": model}), {}),
            (
                "with an optimizer in the state",
                *(made.save, (path, {"model": model, "optimizer": optimizer})),
                {"filter": {"model": lambda name, value: True}},
            ),
            (r"state\.bad", made.save, (path, {"model": model, "bad": object()}), {}),
            (r"expected \['optimizer'\]", made.load, (path, {"model": model, "optimizer": optimizer}), {}),
            ("models that were set up", made.load, (path, {"model": plain}), {}),
            ("got none", made.load, (Path(folder) / "none",), {}),
            ("pickle", made.load, (Path(folder) / "file",), {}),
            ("without Lightning's state", made.load, (path.parent,), {}),
            ("got something else", made.save, (path.parent, {"model": model}), {}),
            ("got Linear", made.load_raw, (path, plain), {}),
            ("got ZeroOptimizer", made.load_raw, (path, optimizer), {}),
        )
        zero_ext.save_checkpoint(path.parent / "other", model.module)
        for message, call, arguments, keywords in cases:
            with pytest.raises((ValueError, TypeError, zero_ext.checkpoint.CheckpointError), match=message):
                call(*arguments, **keywords)
        assert made.load(path, {"model": model}) == {}  # nothing of it was replaced
        made.save(path, {"model": model})
    made.backward(language_loss(model, language_batch(world.seed, 0, 0, 0)) * float("inf"))
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        made.clip_gradients(model, optimizer, max_norm=1.0)
    fp16 = {"precision": {"dtype": "fp16"}}
    for message, config, more in (
        ("config has 'fp16'.*precision='bf16-mixed' means 'bf16'", fp16, {"precision": "bf16-mixed"}),
        ("DoublePrecision", None, {"precision": "64-true"}),
        ("got TorchCheckpointIO", None, {"plugins": TorchCheckpointIO()}),
        ("fabric.setup is given it", {"optimizer": {"type": "AdamW"}}, {}),
    ):
        with pytest.raises(ValueError, match=message):
            fabric(world, ZeroFabricStrategy(config=config), **more)


def test_strategies_have_names_for_the_trainer_and_for_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, kind in ((StrategyRegistry, ZeroStrategy), (STRATEGY_REGISTRY, ZeroFabricStrategy)):
        for name, stage in (("zero_ext", 3), *((f"zero_ext_stage_{each}", each) for each in (1, 2, 3))):
            assert type(registry.get(name)) is kind and registry.get(name).config.stage == stage
    assert type(Trainer(strategy="zero_ext", accelerator="cpu", logger=False).strategy) is ZeroStrategy
    monkeypatch.setenv("ZERO_EXT_CONFIG", "stage=1 gradient_clipping=0.5")
    for name in ("zero_ext", "zero_ext_stage_3"):
        config = Fabric(strategy=name, accelerator="cpu").strategy.config
        assert (config.stage, config.gradient_clipping) == (1, 0.5)
