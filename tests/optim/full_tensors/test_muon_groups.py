"""Which parameters Muon steps and which AdamW, their settings, and Muon by its name in a configuration."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import ConfigError, OptimizerConfig, SchedulerConfig
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler, check_scheduler

SETTINGS: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.05,
    "momentum": 0.9,
    "nesterov": False,
    "ns_coefficients": [2.0, -1.5, 0.5],
    "eps": 1e-6,
    "ns_steps": 4,
    "ns_dtype": "fp32",
    "adjust_lr_fn": "match_rms_adamw",
}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}


class Vocabulary(nn.Module):
    """Embeddings of 11 tokens and 7 positions, a convolution, and an output layer over the tokens."""

    def __init__(self, outputs: int = 11, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 4)
        self.positions = nn.Embedding(7, 4)
        self.mixer = nn.Conv2d(1, 3, 2)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, outputs)
        if tied:
            self.lm_head.weight = self.wte.weight


class WithHead(nn.Module):
    """A model that names its output layer, as Hugging Face's do, inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.predictions = nn.Linear(4, 9)
        self.inner.get_output_embeddings = lambda: self.inner.predictions  # type: ignore[assignment]
        self.last = nn.Linear(4, 4)


class Unsuited(nn.Module):
    """Filters in one, two and three dimensions, single rows and columns, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3))
        self.volume = nn.ConvTranspose3d(2, 4, 2)
        self.image = nn.Conv2d(1, 4, 2)
        self.mix = nn.Conv2d(1, 4, 1)
        self.score = nn.Linear(4, 1)
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.experts = nn.Parameter(torch.ones(3, 4, 2))


def marked() -> nn.Module:
    model = Vocabulary()
    model.wte.weight.use_muon = True  # type: ignore[attr-defined]
    model.hidden.weight.use_muon = False  # type: ignore[attr-defined]
    return model


HIDDEN = {"mixer.weight", "hidden.weight"}
EMBEDDED = {"wte.weight", "positions.weight"}


@pytest.mark.parametrize(
    ("model", "names", "wanted"),
    [
        (Vocabulary(), None, HIDDEN),
        (Vocabulary(tied=True), None, HIDDEN),
        (Vocabulary(outputs=5), None, HIDDEN | {"lm_head.weight"}),
        (WithHead(), None, {"last.weight"}),
        (nn.Linear(3, 2), None, {"weight"}),
        (Unsuited(), None, {"image.weight", "experts"}),
        (Unsuited(), ["experts"], {"image.weight"}),
        (Vocabulary(), ["embed", "lm_head"], HIDDEN | EMBEDDED),
        (Vocabulary(), ["hidd"], {"mixer.weight", "lm_head.weight"} | EMBEDDED),
        (marked(), None, {"wte.weight", "mixer.weight"}),
        (marked(), ["wte"], {"wte.weight", "mixer.weight", "positions.weight", "lm_head.weight"}),
    ],
)
def test_what_muon_steps(model: nn.Module, names: list[str] | None, wanted: set[str]) -> None:
    for made in (
        zero_ext.Muon(model.parameters(), module=model, adamw_names=names),
        zero_ext.Muon(model.named_parameters(), module=model, adamw_names=names),
        build_optimizer(
            OptimizerConfig(type="muon", params={} if names is None else {"adamw_names": names}),
            [{"params": list(model.parameters()), "weight_decay": 0.0}],
            model,
        ),
    ):
        by_rule = {group["use_muon"]: set(map(id, group["params"])) for group in made.param_groups}
        named = dict(model.named_parameters())
        assert {name for name, each in named.items() if id(each) in by_rule[True]} == wanted
        assert {name for name, each in named.items() if id(each) in by_rule.get(False, ())} == (
            named.keys() - wanted
        )


def test_all_settings_come_from_a_configuration() -> None:
    model = Vocabulary()
    policy = OptimizerConfig(type="muon", params={**SETTINGS, "adamw": ADAMW})
    made = build_optimizer(policy, model.parameters(), model)
    muon, adamw = made.param_groups
    assert type(made) is zero_ext.Muon and muon["use_muon"] and not adamw["use_muon"]
    assert {key: muon[key] for key in SETTINGS} == {**SETTINGS, "ns_coefficients": (2.0, -1.5, 0.5)}
    assert {key: adamw[key] for key in ADAMW} == {**ADAMW, "betas": (0.8, 0.9)}
    groups = [{"params": [model.hidden.weight, model.norm.weight], "weight_decay": 0.0, "lr": 0.5}]
    for group in build_optimizer(policy, groups, model).param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.0)


# Params, the key that the error names, and words of the error.
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"lr": -1}, "lr", "at least 0"),
    ({"momentum": -0.1}, "momentum", "at least 0"),
    ({"momentum": 1.0}, "momentum", "below 1"),
    ({"weight_decay": "x"}, "weight_decay", "finite number"),
    ({"eps": -1e-7}, "eps", "at least 0"),
    ({"nesterov": 1}, "nesterov", "true or false"),
    ({"ns_coefficients": [1.0, 2.0]}, "ns_coefficients", "a list of 3 numbers of any sign"),
    ({"ns_coefficients": 3.0}, "ns_coefficients", "a list of 3 numbers of any sign"),
    ({"ns_steps": 100}, "ns_steps", "an integer from 0 to 99"),
    ({"ns_steps": 2.5}, "ns_steps", "an integer from 0 to 99"),
    ({"ns_steps": -1}, "ns_steps", "an integer from 0 to 99"),
    ({"ns_dtype": "fp16"}, "ns_dtype", "'bf16' or 'fp32'"),
    ({"ns_dtype": 1}, "ns_dtype", "a string"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn", "'original' or 'match_rms_adamw'"),
    ({"adjust_lr_fn": []}, "adjust_lr_fn", "'original' or 'match_rms_adamw'"),
    ({"adamw": 0.1}, "adamw", "expected a mapping"),
    ({"adamw": []}, "adamw", "expected a mapping"),
    ({"adamw": {"lr": -1}}, "adamw.lr", "at least 0"),
    ({"adamw": {"eps": "x"}}, "adamw.eps", "at least 0"),
    ({"adamw": {"betas": [0.9, 1.0]}}, "adamw.betas", "below 1"),
    ({"adamw": {"betas": 0.9}}, "adamw.betas", "two numbers"),
    ({"adamw": {"momentum": 0.9}}, "adamw.momentum", "expected one of lr, betas, eps, weight_decay"),
    ({"adamw_names": "embed"}, "adamw_names", "a list of strings"),
    ({"adamw_names": [1]}, "adamw_names", "a list of strings"),
    ({"adamw_names": 1}, "adamw_names", "a list of strings"),
    ({"module": None}, "module", "Muon has no such parameter"),
    ({"ns_method": "gram"}, "ns_method", "Muon has no such parameter"),
]


@pytest.mark.parametrize(("params", "key", "words"), MISTAKES)
def test_bad_settings(params: dict[str, Any], key: str, words: str) -> None:
    model = Vocabulary()
    with pytest.raises(ConfigError) as caught:
        build_optimizer(OptimizerConfig(type="Muon", params=params), model.parameters(), model)
    assert f"optimizer.params.{key}" in caught.value.paths
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"ns_coefficients": (1.0, math.nan, 1.0)}, "ns_coefficients: expected three finite numbers"),
        ({"ns_coefficients": (1.0, math.inf, 1.0)}, "ns_coefficients: expected three finite numbers"),
        ({"lr": torch.tensor(-0.1)}, "lr: expected a finite number of at least 0"),
        ({"adamw": {"lr": math.nan}}, r"adamw\.lr: expected a finite number"),
    ],
)
def test_bad_values_that_no_configuration_holds(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zero_ext.Muon([nn.Parameter(torch.ones(1))], **setting)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("maximize", True, "expected False, got True"),
        ("decoupled_weight_decay", False, "expected True, got False"),
        ("amsgrad", True, "got another key"),
        ("lrr", 0.1, "got another key"),
    ],
)
def test_keys_of_a_group_that_no_step_reads(key: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: .*{words}"):
        zero_ext.Muon([{"params": nn.Linear(3, 3).parameters(), key: value}])


# What is changed in a group after construction, the group, and the error.
CHANGES: list[tuple[int, dict[str, Any], str]] = [
    (0, {"use_muon": False}, r"param_groups\[0\]\.use_muon: expected True as at construction"),
    (1, {"use_muon": True}, r"param_groups\[1\]\.use_muon: expected False as at construction"),
    (0, {"momentum": 2.0}, r"param_groups\[0\]\.momentum: expected a number below 1"),
    (0, {"adjust_lr_fn": "rms"}, r"param_groups\[0\]\.adjust_lr_fn: expected 'original'"),
    (0, {"maximize": True}, r"param_groups\[0\]\.maximize: expected False"),
    (
        0,
        {"ns_coefficients": (1.0, math.nan, 1.0)},
        r"param_groups\[0\]\.ns_coefficients: expected three finite",
    ),
    (0, {"ns_dtype": "tf32"}, r"param_groups\[0\]\.ns_dtype: expected 'bf16' or 'fp32'"),
    (1, {"betas": (0.9, 1.0)}, r"param_groups\[1\]\.betas: expected two numbers"),
]


@pytest.mark.parametrize(("index", "change", "words"), CHANGES)
def test_changed_groups_are_refused_by_the_next_step(index: int, change: dict[str, Any], words: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = zero_ext.Muon(model.parameters())
    before = [each.clone() for each in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.param_groups[index].update(change)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert not optimizer.state and all(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_changed_groups_are_refused_by_the_next_sharded_step(world: World) -> None:
    for index, change, words in CHANGES:
        model, optimizer = zero_ext.prepare(
            module := nn.Linear(3, 3), zero_ext.Muon(module.parameters()), {}, process_group=world.group
        )
        model(torch.ones(1, 3)).sum().backward()
        optimizer.param_groups[index].update(change)
        with pytest.raises(ValueError, match=words):
            optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_have_the_settings_of_both_rules(copied: Callable[[zero_ext.Muon], zero_ext.Muon]) -> None:
    model = nn.Linear(3, 3)
    made = copied(zero_ext.Muon(model.parameters(), lr=0.3, adamw={"lr": 0.2}))
    for rule in (True, False):
        made.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": rule})
    assert [group["lr"] for group in made.param_groups] == [0.3, 0.2, 0.3, 0.2]
    made.step()


def test_state_of_torch_muon_goes_on() -> None:
    torch.manual_seed(5)
    model, inputs = nn.Linear(4, 6, bias=False), torch.randn(3, 4)
    theirs = torch.optim.Muon(model.parameters(), lr=0.02)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()

    train(model, theirs)
    other = copy.deepcopy(model)
    made = zero_ext.Muon(other.parameters())
    made.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(model, theirs)
    train(other, made)
    assert torch.equal(model.weight, other.weight)
    adamw = zero_ext.Muon([{"params": other.parameters(), "use_muon": False}])
    with pytest.raises(ValueError, match=r"use_muon: expected False as at construction, got True"):
        adamw.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), r"expected matrices with elements, got a parameter of shape \(3,\)"),
        (torch.ones(0, 3), r"expected matrices with elements, got a parameter of shape \(0, 3\)"),
        (torch.ones(3, 0), r"expected matrices with elements, got a parameter of shape \(3, 0\)"),
        (
            torch.ones(2, 2, dtype=torch.complex64),
            "expected real numbers, got a parameter of torch.complex64",
        ),
    ],
)
def test_parameters_that_muon_cannot_step(value: torch.Tensor, words: str) -> None:
    parameter, matrix = nn.Parameter(value), nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"use_muon: {words}"):
        zero_ext.Muon([{"params": [matrix, parameter], "use_muon": True}])
    parameter.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"use_muon: {words}"):
        zero_ext.Muon([matrix, parameter])
    if not value.is_complex():
        parameter.use_muon = False  # type: ignore[attr-defined]
        assert len(zero_ext.Muon([matrix, parameter]).param_groups) == 2


def test_a_sparse_gradient_is_refused_before_anything_is_stepped() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 3, sparse=True))
    optimizer = zero_ext.Muon(model.parameters(), module=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0](model[1](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected dense gradients(?s:.*)Pass sparse=False"):
        optimizer.step()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not optimizer.state


def test_filters_of_a_convolution_are_one_matrix() -> None:
    torch.manual_seed(4)
    filters, matrix = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(torch.randn(6, 18))
    with torch.no_grad():
        filters.copy_(matrix.view_as(filters))
    gradient = torch.randn(6, 18)
    for parameter in (filters, matrix):
        parameter.grad = gradient.view_as(parameter)
        zero_ext.Muon([parameter], adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(filters.flatten(1), matrix)


# A schedule, and each rule's learning rate after the step, of Muon 0.02 and AdamW 0.003.
SCHEDULES: list[tuple[str, dict[str, Any], tuple[float, float]]] = [
    ("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, (0.0, 0.0)),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_min_ratio": 0.5},
        (0.01, 0.0015),
    ),
    ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": [0.02, 0.003]}, (1e-3, 1e-3)),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_lr": 1e-3}, (1e-3, 1e-3)),
    ("StepLR", {"step_size": 1}, (2e-3, 3e-4)),
    ("LinearLR", {"start_factor": 0.5, "total_iters": 2}, (0.015, 0.00225)),
    ("CyclicLR", {"base_lr": [0.02, 0.003], "max_lr": [0.04, 0.006], "step_size_up": 1}, (0.04, 0.006)),
    ("OneCycle", {"cycle_min_lr": [0.02, 0.003], "cycle_max_lr": [0.04, 0.006]}, (0.02001, 0.0030015)),
]


@pytest.mark.parametrize(("name", "params", "wanted"), SCHEDULES)
def test_schedules_move_both_rates(name: str, params: dict[str, Any], wanted: tuple[float, float]) -> None:
    model = Vocabulary()
    policy = OptimizerConfig(type="Muon", params={"lr": 0.02, "adamw": {"lr": 0.003}})
    optimizer = build_optimizer(policy, model.parameters(), model)
    scheduler = SchedulerConfig(type=name, params=params)
    check_scheduler(scheduler, optimizer)
    made = build_scheduler(scheduler, optimizer)
    optimizer.step()
    made.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(wanted)
    muon, adamw = optimizer.param_groups
    assert (muon["use_muon"], adamw["use_muon"], muon["momentum"]) == (True, False, 0.95)
    assert (adamw["betas"] != (0.9, 0.999)) == (name in ("CyclicLR", "OneCycle"))


class Sums(nn.Module):
    """Few matrices, of which a rank owns at most two, filters, and an embedding with an output layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(8, 6)
        self.hidden = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 6))
        self.filters = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(6, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting ids [n] from themselves."""
        hidden = self.hidden(self.wte(ids)).tanh()
        hidden = hidden + self.filters(hidden.view(-1, 1, 2, 3)).mean(1).flatten(1)
        return nn.functional.cross_entropy(self.head(hidden), ids)


OPTIMIZER: dict[str, Any] = {"type": "Muon", "params": {**SETTINGS, "adamw": {**ADAMW, "eps": 1e-3}}}
SCHEDULER: dict[str, Any] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}


@on_ranks(1, 2, 4, by_turns=True)
def test_a_configuration_trains_as_one_process(world: World) -> None:
    ids = torch.randint(8, (3, 8), generator=torch.Generator().manual_seed(world.seed))
    alone = Sums(world.seed)
    settings = {**OPTIMIZER["params"], "adamw": {**ADAMW, "eps": 1e-3}}
    plain = zero_ext.Muon(alone.parameters(), module=alone, **settings)
    assert [len(group["params"]) for group in plain.param_groups] == [4, 6]
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(3):
        alone(ids[step]).backward()
        plain.step()
        plain.zero_grad()
        schedule.step()
    mine = 8 // world.size
    for stage in (1, 3):
        config = {"stage": stage, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}
        with zero_ext.Init(config, process_group=world.group):
            model = Sums(world.seed)
        engine, *_ = zero_ext.initialize(model=model, config=config, process_group=world.group)
        for step in range(3):
            engine.backward(engine(ids[step, world.rank * mine :][:mine]))
            engine.step()
        assert engine.get_lr() == schedule.get_last_lr()
        found = zero_ext.full_state_dict(engine.module, rank0_only=False)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def changed(optimizer: torch.optim.Optimizer, **settings: Any) -> torch.optim.Optimizer:
    optimizer.param_groups[-1].update(settings)
    return optimizer


@on_ranks(2)
def test_bad_groups_are_refused_before_the_model_is_touched(world: World) -> None:
    model = nn.Module()
    model.matrix, model.empty = nn.Linear(3, 3), nn.Linear(0, 3, bias=False)
    matrix = [model.matrix.weight]
    cases: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.Muon([*matrix, model.empty.weight]), r"use_muon: .* shape \(3, 0\)"),
        (changed(torch.optim.Muon(matrix), ns_coefficients=(1.0, math.nan, 1.0)), "ns_coefficients: "),
        (changed(zero_ext.Muon(model.parameters()), use_muon=True), r"use_muon: .* shape \(3,\)"),
        (changed(zero_ext.Muon(model.parameters()), lr=-1.0), "lr: expected a finite number of at least 0"),
        (changed(zero_ext.Muon(matrix), momentum=math.inf), "momentum: expected a finite number"),
    ]
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for optimizer, words in cases:
        with pytest.raises(ValueError, match=words):
            zero_ext.prepare(model, optimizer, {"stage": 3}, process_group=world.group)
        assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    zero_ext.prepare(model, zero_ext.Muon(model.parameters()), {"stage": 3}, process_group=world.group)
