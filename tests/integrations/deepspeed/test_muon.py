"""DeepSpeed's JSON with type "Muon": its params by its own code, its steps by its own optimizer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext.config import ConfigError, load_deepspeed_config
from zero_ext.optim.optimizer_builder import build_optimizer

STEPS = 4
COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Blocks(nn.Module):
    """Matrices that are square, wide and tall, a stack, and what DeepSpeed gives to Adam by name.

    There are no filters of a convolution, on which DeepSpeed 0.19.8 fails.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed_tokens = nn.Embedding(10, 24)
        self.wte = nn.Embedding(9, 24)  # to Muon, as its name does not say what it is
        self.square = nn.Linear(24, 24)
        self.wide = nn.Linear(48, 16, bias=False)
        self.tall = nn.Linear(16, 48, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 20, 8))
        self.norm = nn.LayerNorm(24)
        self.LM_Head = nn.Linear(24, 10, bias=False)


def translated(params: dict[str, Any], **keys: Any) -> Any:
    return load_deepspeed_config({"optimizer": {"type": "Muon", "params": params}, **keys})


def deepspeeds(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed's engine makes, without its compiled Adam."""
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params=params), model)
    groups = deepspeed.DeepSpeedEngine._muon_param_groups(list(model.parameters()), params)
    made: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return made


PARAMS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.5, "muon_lr": 0.03, "adam_lr": 0.002, "momentum": 0.8},
    {"adam_lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-3, "ns_method": "standard"},
    {"muon_lr": 0.05, "ns_method": "gram", "weight_decay": 0.3},
]


@pytest.mark.parametrize("params", PARAMS)
def test_steps_as_deepspeeds_own(params: dict[str, Any]) -> None:
    """Adam's parameters to rounding of fp32, Muon's to that of its iteration, in fp32 with "gram"."""
    twin = Blocks()
    theirs = deepspeeds(twin, params)
    own = Blocks()
    policy = translated(params).config.optimizer
    optimizer = build_optimizer(policy, own.parameters(), own)
    assert type(optimizer) is zero_ext.Muon
    for mine, group in zip(optimizer.param_groups, theirs.param_groups, strict=True):
        settings = {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for key in settings.keys() - {"params", "ns_method", "name"}:
            assert mine[key] == settings[key], key
        assert len(mine["params"]) == len(group["params"])
    before = copy.deepcopy(own.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(STEPS):
            for parameter, other in zip(own.parameters(), twin.parameters(), strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                other.grad = parameter.grad.clone()
            optimizer.step()
            theirs.step()
    served = {id(each) for each in optimizer.param_groups[0]["params"]}
    for name, value in own.named_parameters():
        moved, wanted = value - before[name], twin.get_parameter(name) - before[name]
        matrix = 2e-3 if params.get("ns_method") == "gram" else 0.05
        bound = matrix if id(value) in served else 1e-4
        assert (moved - wanted).norm() <= bound * wanted.norm(), name


def test_initialize_follows_names_and_marks() -> None:
    model = Blocks()
    model.square.weight.use_muon = False  # type: ignore[attr-defined]
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "muon", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.03, 0.002], "warmup_num_steps": 2}},
        "zero_optimization": {"stage": 2},
    }
    engine, optimizer, _, _ = zero_ext.initialize(model=model, config=config)
    named = {id(each): name for name, each in engine.module.named_parameters()}
    muon, adamw = optimizer.param_groups
    assert muon["use_muon"] and not adamw["use_muon"]
    assert {named[id(each)] for each in muon["params"]} == {
        "wte.weight",
        "wide.weight",
        "tall.weight",
        "stack",
    }
    for _ in range(3):
        engine.backward(torch.stack([each.square().sum() for each in engine.module.parameters()]).sum())
        engine.step()
    assert engine.get_lr() == [0.03, 0.002]


def exact(matrix: torch.Tensor) -> torch.Tensor:
    """The polynomial of Newton-Schulz in float64."""
    a, b, c = COEFFICIENTS
    found = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found


@pytest.mark.parametrize("shape", [(32, 128), (48, 48), (16, 400)])
def test_the_iteration_is_at_least_as_exact_as_deepspeeds_standard(shape: tuple[int, int]) -> None:
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = matrix.clone()
    zero_ext.Muon([parameter], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    wanted = exact(matrix)
    with torch.compiler.set_stance("force_eager"):
        errors = {
            method: (
                muon.muon_update(matrix.clone(), torch.zeros(shape), beta=0.0, ns_method=method) - wanted
            ).norm()
            for method in ("standard", "gram")
        }
    assert (-parameter.detach() - wanted).norm() <= errors["standard"] <= 0.05 * wanted.norm()
    assert errors["gram"] <= 0.005 * wanted.norm()


@pytest.mark.parametrize(
    ("params", "key", "words"),
    [
        ({"lr": -1}, "lr", "at least 0"),
        ({"muon_lr": "x"}, "muon_lr", "finite number"),
        ({"betas": [0.9, 1]}, "betas", "a list of 2 numbers in [0, 1)"),
        ({"ns_method": "cubic"}, "ns_method", "'gram' or 'standard'"),
        ({"ns_steps": 3}, "ns_steps", "unknown key"),
        ({"adam_w_mode": False}, "adam_w_mode", "decoupled"),
        ({"per_head_muon": True}, "per_head_muon", "not head by head"),
        ({"fp32_optimizer_states": False}, "fp32_optimizer_states", "bf16_optimizer_states"),
        ({"max_grad_norm": 1.0}, "max_grad_norm", "Use gradient_clipping"),
        ({"lr": "auto"}, "lr", "which nothing resolves"),
    ],
)
def test_what_deepspeeds_params_are_refused(params: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(params)
    assert caught.value.paths == (f"optimizer.params.{key}",) and words in str(caught.value)


def test_what_is_noted() -> None:
    params = {"ns_method": "gram", "torch_adam": True, "foreach": None, "adam_w_mode": True}
    zero = {"stage": 3, "save_muon_momentum_buffer_in_memory": True, "reduce_scatter": False}
    notes = {note.path: note.outcome for note in translated(params, zero_optimization=zero).notes}
    assert notes == {
        "optimizer.params.torch_adam": "no effect",
        "optimizer.params.foreach": "no effect",
        "zero_optimization.save_muon_momentum_buffer_in_memory": "no effect",
        "zero_optimization.reduce_scatter": "no effect",
        "gradient_clipping": "default",
    }
    calm = translated({"ns_method": "standard"}, zero_optimization={"stage": 2}, gradient_clipping=0)
    assert calm.notes == ()
    clipped = translated({}, zero_optimization={"stage": 2}, gradient_clipping=0.5).notes
    assert [(note.path, note.outcome) for note in clipped] == [("gradient_clipping", "difference")]
