"""The engine loop with DeepSpeed's JSON: the introduction verbatim, and what its keys switch on."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.models import VOCABULARY, TinyModel
from tests.zero.step.test_loss_scaler import Reference
from tests.zero.training import distance
from zero_ext.config import LossScaleConfig, SchedulerConfig
from zero_ext.optim.optimizer_builder import build_scheduler
from zero_ext.zero import engine_of

MODULE = "tests.integrations.test_initialize"
INTRODUCTION: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
TIME = 6


class LanguageModel(nn.Module):
    """Takes its inputs by name and returns an object with a loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel()
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor, index: torch.Tensor, spoilt: float = 0.0) -> SimpleNamespace:
        self.seen += index.tolist()
        logits = self.inner(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        return SimpleNamespace(loss=loss + spoilt * logits.float().mean())


class Sentences:
    """Samples {ids, index}; every one differs."""

    def __init__(self, seed: int, count: int) -> None:
        self.ids = torch.randint(0, VOCABULARY, (count, TIME), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": self.ids[index], "index": index}


def batch_of(data: Sentences, samples: int, step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    first = ((step * 2 + micro) * 16 + rank * samples) % (len(data) - samples)
    return torch.utils.data.default_collate([data[number] for number in range(first, first + samples)])


class PlainLoop:
    """fp16 parameters, fp32 masters, AdamW, loss scale and clipping by torch alone, on all ranks' data."""

    def __init__(self, model: nn.Module, ranks: int, policy: LossScaleConfig) -> None:
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.model, self.ranks = model.half(), ranks
        self.optimizer = torch.optim.AdamW(self.masters)
        self.scaler = Reference(policy)
        self.skipped = 0
        self.norm = math.nan

    def step(self, batches: list[list[dict[str, torch.Tensor]]]) -> list[list[float]]:
        """One step on ``batches[micro][rank]``; the losses likewise."""
        losses = [[self._backward(batch, len(batches)) for batch in micro] for micro in batches]
        gradients = [master.grad for master in self.masters if master.grad is not None]
        overflow = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        for gradient in gradients:
            gradient /= self.scaler.scale
        self.scaler.update(overflow)
        self.skipped += overflow
        if not overflow:
            self.norm = nn.utils.clip_grad_norm_(self.masters, 0.4).item()
            self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return losses

    def _backward(self, batch: dict[str, torch.Tensor], micro_batches: int) -> float:
        loss: torch.Tensor = self.model(**batch).loss
        (loss / micro_batches * self.scaler.scale).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.float() / self.ranks
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
        return loss.item()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("fp16", [{}, {"initial_scale_power": 20, "hysteresis": 1}])
def test_the_introductory_loop(world: World, fp16: dict[str, int]) -> None:
    config = json.loads(json.dumps(INTRODUCTION))
    config["fp16"].update(fp16)
    config["gradient_clipping"] = 0.4
    policy = LossScaleConfig(
        initial_power=fp16.get("initial_scale_power", 16), hysteresis=fp16.get("hysteresis", 2)
    )
    torch.manual_seed(world.seed)
    plain = PlainLoop(LanguageModel(), world.size, policy)
    torch.manual_seed(world.seed)
    model = LanguageModel()
    engine, optimizer, loader, scheduler = zero_ext.initialize(
        model=model, config=config, model_parameters=model.parameters(), process_group=world.group
    )
    assert isinstance(optimizer, torch.optim.Optimizer) and loader is None and scheduler is None
    data, samples, norms = Sentences(world.seed, 200), 16 // 2 // world.size, []
    for step in range(5):
        batches = [[batch_of(data, samples, step, m, r) for r in range(world.size)] for m in range(2)]
        wanted = plain.step(batches)
        for micro in range(2):
            inputs = batches[micro][world.rank]
            loss = engine(**inputs).loss
            assert engine.is_gradient_accumulation_boundary() == (micro == 1)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(wanted[micro][world.rank], rel=3e-4)
        assert engine.global_steps == step + 1 and engine.skipped_steps == plain.skipped
        if math.isfinite(engine.get_global_grad_norm() or math.nan):
            assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-3)
            norms.append(plain.norm)
    assert max(norms) > 0.4  # so that gradients were clipped
    assert plain.skipped in (range(1, 5) if fp16 else [0])
    found = zero_ext.full_state_dict(engine)
    assert all(value.dtype is torch.float16 for value in found.values())
    assert distance(found, plain.model.state_dict()) < 1e-3
    assert engine.gradient_accumulation_steps() == 2 and engine.train_batch_size() == 16
    assert engine.device.type == "cpu" and engine.get_lr() == [1e-3]


@on_ranks(2)
def test_one_rank_that_overflows_makes_all_skip_step_and_schedule(world: World) -> None:
    config = {
        **INTRODUCTION,
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }
    engine, _, _, scheduler = zero_ext.initialize(
        model=LanguageModel(), config=config, process_group=world.group
    )
    data = Sentences(world.seed, 100)
    rates, before = [], zero_ext.full_state_dict(engine)
    for step in range(4):
        for micro in range(2):
            spoilt = math.inf if (step, micro, world.rank) in ((0, 0, 1), (2, 1, 0)) else 0.0
            loss = engine(**batch_of(data, 4, step, micro, world.rank), spoilt=spoilt).loss
            engine.backward(loss)
            engine.step()
        rates.append(engine.get_lr()[0])
        after = zero_ext.full_state_dict(engine)
        moved = any(not torch.equal(after[name], before[name]) for name in after)
        before = after
        assert moved == (step in (1, 3))
        assert engine.skipped_steps == (1, 1, 2, 2)[step]
        assert engine_of(engine).optimizer_step.scaler.scale == 2.0 ** (7, 7, 6, 6)[step]
    assert rates == [0.1, 0.05, 0.05, 0.025]
    assert scheduler is engine.lr_scheduler and engine.get_global_grad_norm() is not None


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 6},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 7},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 3,
        "cycle_momentum": False,
    },
    "StepLR": {"step_size": 2, "gamma": 0.5},
}


@on_ranks(1, 2)
def test_schedulers_of_the_json_move_the_rate_that_is_used(world: World) -> None:
    for name, params in SCHEDULES.items():
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
            "scheduler": {"type": name, "params": params},
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 0.0,
        }
        alone = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.02)
        schedule = build_scheduler(SchedulerConfig(type=name, params=params), alone)
        alone.step()
        rates = []
        model = nn.Linear(3, 1, bias=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine, _, _, _ = zero_ext.initialize(model=model, config=config, process_group=world.group)
            for _ in range(6):
                before = zero_ext.full_state_dict(engine)["weight"]
                loss = engine(torch.ones(2, 3)).mean()
                engine.backward(loss)
                engine.step()
                moved = (before - zero_ext.full_state_dict(engine)["weight"]).tolist()[0]
                rates.append(alone.param_groups[0]["lr"])
                assert moved == pytest.approx([rates[-1]] * 3, abs=1e-6), (name, rates)
                schedule.step()
                assert engine.get_lr() == [alone.param_groups[0]["lr"]]
        assert len(set(rates)) > 2


@on_ranks(2)
def test_arguments_of_the_caller_precede_the_configuration(world: World) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 5.0}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 1},
    }

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1 / (step + 1))

    for built in (False, True):
        model = nn.Linear(3, 1)
        own = make(model.parameters())
        built_arguments = {"optimizer": own, "lr_scheduler": schedule(own)} if built else {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine, optimizer, _, scheduler = zero_ext.initialize(
                model=model,
                config=config,
                process_group=world.group,
                **(built_arguments or {"optimizer": make, "lr_scheduler": schedule}),
            )
            for step in range(3):
                assert engine.get_lr() == [pytest.approx(0.5 / (step + 1))]
                engine.backward(engine(torch.ones(2, 3)).mean())
                engine.step()
        assert isinstance(scheduler, LambdaLR) and optimizer is engine.optimizer


@on_ranks(2)
def test_what_has_no_effect_or_is_assumed_is_said_once(world: World) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_ext")
    logger.addHandler(handler)
    try:
        config = {**INTRODUCTION, "dump_state": True}
        engine, _, _, _ = zero_ext.initialize(model=LanguageModel(), config=config, process_group=world.group)
        data = Sentences(world.seed, 50)
        for micro in range(4):
            engine.backward(engine(**batch_of(data, 4, 0, micro, world.rank)).loss)
            engine.step()
    finally:
        logger.removeHandler(handler)
    for words in ("no optimizer given", "dump_state"):
        assert sum(words in line for line in said) == (1 if world.rank == 0 else 0), said


@on_ranks(2)
def test_a_line_every_few_steps_on_the_first_rank(world: World) -> None:
    config = {"train_batch_size": 4, "steps_per_print": 2, "zero_optimization": {"stage": 2}}
    engine, _, _, _ = zero_ext.initialize(model=nn.Linear(3, 1), config=config, process_group=world.group)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        for _ in range(5):
            engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()
    lines = printed.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == (["step 2", "step 4"] if world.rank == 0 else [])
    assert all("lr 0.001" in line and "gradient norm" in line for line in lines)


@on_ranks(2)
def test_bad_input_is_refused_before_the_model_changes(world: World) -> None:
    model = LanguageModel()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    data = Sentences(world.seed, 50)
    sgd, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"train_batch_size": 15}, {}, "train_batch_size"),
        ({"zero_optimisation": {"stage": 2}}, {}, "zero_optimization"),
        ({"zero_optimization": {"stage": 4}}, {}, "stage"),
        ({"optimizer": {"type": "LBFGS", "params": {}}}, {}, "LBFGS"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, {}, "warmup"),
        ({}, {"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        ({}, {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "parameters of the model"),
        ({"train_batch_size": None}, {"training_data": data}, "batch size"),
        ({}, {"optimizer": lambda _: None}, "returns an optimizer of torch's, got None"),
        ({}, {"optimizer": sgd, "lr_scheduler": LambdaLR(other, float)}, "expected one over optimizer="),
        ({}, {"training_data": Sentences(world.seed, 0)}, "dataset: expected a length of at least 1, got 0"),
    ]
    for change, arguments, pattern in cases:
        config = {key: value for key, value in {**INTRODUCTION, **change}.items() if value is not None}
        with pytest.raises((ValueError, TypeError), match=pattern):
            zero_ext.initialize(model=model, config=config, process_group=world.group, **arguments)
        after = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        assert after == before, pattern
    zero_ext.initialize(model=model, config=INTRODUCTION, process_group=world.group)


def consume(world: World, directory: str, steps: int, resume: bool, seed: int, save: bool) -> dict[str, Any]:
    """Trains on a loader; what was seen by sample number, in order."""
    torch.manual_seed(seed)
    model = LanguageModel()
    engine, _, loader, _ = zero_ext.initialize(
        model=model, config=INTRODUCTION, training_data=Sentences(seed, 208), process_group=world.group
    )
    assert loader is not None and engine.training_dataloader is loader
    if resume:
        path, client = engine.load_checkpoint(directory)
        assert path == str(Path(directory) / f"global_step{engine.global_steps}")
        assert client == {"note": "hello"}
    done = engine.global_steps
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
        if engine.global_steps == done + steps:
            break
    if save:
        engine.save_checkpoint(directory, client_state={"note": "hello"})
    return {"seen": world.everyone(model.seen), "steps": engine.global_steps, "batches": len(loader)}


@pytest.mark.parametrize(("first", "second", "third"), [(2, 4, 1), (4, 1, 2), (1, 2, 4)])
def test_a_resume_at_another_world_size_repeats_and_skips_no_sample(
    rank_pool: RankPool, tmp_path: Path, first: int, second: int, third: int
) -> None:
    arguments = {"directory": str(tmp_path), "seed": 5}
    seen: list[int] = []
    for number, (ranks, steps) in enumerate(((first, 3), (second, 4), (third, 100))):
        found = rank_pool.run(
            ranks,
            f"{MODULE}:consume",
            {**arguments, "steps": steps, "resume": number > 0, "save": number < 2},
        )[0]
        assert found["batches"] * (16 // 2) == 208
        assert len({len(own) for own in found["seen"]}) == 1  # every rank has equally much to do
        seen += [sample for own in found["seen"] for sample in own]
        assert len(set(seen)) == len(seen) == 16 * found["steps"]
    assert sorted(seen) == list(range(208))
    assert seen != sorted(seen)
    single = rank_pool.run(
        1, f"{MODULE}:consume", {**arguments, "steps": 100, "resume": False, "save": False}
    )[0]
    assert set(single["seen"][0][: 16 * 3]) == set(seen[: 16 * 3])  # the same order at every world size
