"""1-bit Adam and 0/1 Adam as torch optimizers: their schedules, their copies, and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

import zero_ext
from tests.zero.step.one_bit.simulation import Course, exchanges
from zero_ext.config import ConfigError, OptimizerConfig, ZeroConfig
from zero_ext.optim.one_bit import CompressionPhase, check_one_bit_optimizer
from zero_ext.optim.optimizer_builder import build_optimizer


def made(kind: str, **settings: Any) -> Any:
    return getattr(zero_ext, kind)([torch.zeros(3)], **settings)


def test_the_variance_is_frozen_after_freeze_step_steps() -> None:
    optimizer = made("OneBitAdam", freeze_step=3)
    for sharded, then in ((False, CompressionPhase.MOMENTUM), (True, CompressionPhase.GRADIENT)):
        assert [optimizer.phase(step, sharded) for step in range(1, 6)] == [CompressionPhase.FULL] * 3 + [
            then
        ] * 2
    assert made("OneBitAdam", freeze_step=math.inf).phase(10**9, False) is CompressionPhase.FULL


@pytest.mark.parametrize("policy", [(20, 3, 5, 8), (33, 2, 7, 4), (1, 1, 1, 1), (64, 5, 3, 16)])
def test_the_schedule_of_0_1_adam_is_that_of_its_counters(policy: tuple[int, ...]) -> None:
    names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    settings = dict(zip(names, policy, strict=True))
    optimizer = made("ZeroOneAdam", **settings)
    course = Course("ZeroOneAdam", 0, "fp32", 1, settings, 150)
    assert [optimizer.phase(step, False).value for step in range(1, 151)] == list(exchanges(course))


def test_copies_keep_the_schedule() -> None:
    optimizer = made("ZeroOneAdam", var_freeze_step=7, local_step_clipper=3)
    for twin in (copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (twin.var_freeze_step, twin.local_step_clipper) == (7, 3)
        assert Counter(twin.phase(step, False) for step in range(1, 100)) == Counter(
            optimizer.phase(step, False) for step in range(1, 100)
        )


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        ("OneBitAdam", {"freeze_step": 0}, "freeze_step: expected .*, got 0"),
        ("OneBitAdam", {"freeze_step": -3}, "freeze_step: expected .*, got -3"),
        ("OneBitAdam", {"freeze_step": 2.5}, "freeze_step: expected .*, got 2.5"),
        ("OneBitAdam", {"freeze_step": math.nan}, "freeze_step: expected .*, got nan"),
        ("OneBitAdam", {"lr": -1.0}, "lr: expected .*, got -1.0"),
        ("OneBitAdam", {"betas": (0.9, 1.0)}, "betas: "),
        ("OneBitLamb", {"freeze_step": 0}, "freeze_step: expected .*, got 0"),
        ("OneBitLamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff: expected .*, got 2.0"),
        ("OneBitLamb", {"factor_min": -1.0}, "factor_min: expected .*, got -1.0"),
        ("OneBitLamb", {"coeff_beta": 1.0}, "coeff_beta: expected .*, got 1.0"),
        ("ZeroOneAdam", {"var_update_scaler": 0}, "var_update_scaler: expected .*, got 0"),
        ("ZeroOneAdam", {"local_step_clipper": 0}, "local_step_clipper: expected .*, got 0"),
        ("ZeroOneAdam", {"eps": math.inf}, "eps: expected .*, got inf"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(kind: str, settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        made(kind, **settings)


def test_a_step_before_prepare_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"OneBitAdam.step\(\): it was called before zero_ext.prepare"):
        made("OneBitAdam").step()


def test_configurations_name_them_in_any_case() -> None:
    policy = OptimizerConfig(type="onebitadam", params={"freeze_step": 5, "cuda_aware": True})
    optimizer = build_optimizer(policy, [torch.zeros(3)])
    assert isinstance(optimizer, zero_ext.OneBitAdam)
    assert optimizer.freeze_step == 5 and optimizer.defaults["lr"] == 1e-3
    with pytest.raises(ConfigError, match=r"optimizer.params.freeze_step: expected .*, got .*0"):
        build_optimizer(OptimizerConfig(type="OneBitAdam", params={"freeze_step": 0}), [torch.zeros(3)])


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stage": 2}, "stage: expected 0 or 1 with {kind}, got 2"),
        ({"stage": 3}, "stage: expected 0 or 1 with {kind}, got 3"),
        (
            {"stage": 1, "offload": {"optimizer": "host"}},
            "offload.optimizer: expected 'device' with {kind}, got 'host'",
        ),
        (
            {"stage": 0, "offload": {"update_mode": "in_backward"}},
            "offload.update_mode: expected 'after_backward' with {kind}, got 'in_backward'",
        ),
        (
            {"stage": 0, "precision": {"moments_dtype": "bf16"}},
            "precision.moments_dtype: expected 'fp32' with {kind}, got 'bf16'",
        ),
        (
            {"stage": 0, "precision": {"moments_dtype": "8bit"}},
            "precision.moments_dtype: expected 'fp32' with {kind}, got '8bit'",
        ),
    ],
)
def test_configurations_that_cannot_serve_them_are_refused(
    kind: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text.format(kind=kind)):
        ZeroConfig.from_mapping({**settings, "optimizer": {"type": kind}})
    with pytest.raises(ValueError, match=text.format(kind=kind)):
        check_one_bit_optimizer(made(kind), ZeroConfig.from_mapping(settings))
    model = torch.nn.Linear(3, 3)
    optimizer = getattr(zero_ext, kind)(model.parameters())
    with pytest.raises(ValueError, match=text.format(kind=kind)):
        zero_ext.prepare(model, optimizer, settings)


def test_local_steps_with_sharded_moments_are_refused() -> None:
    config = ZeroConfig(stage=1)
    with pytest.raises(ValueError, match="expected local_step_clipper 1 in stage 1, got 16"):
        check_one_bit_optimizer(made("ZeroOneAdam"), config)
    check_one_bit_optimizer(made("ZeroOneAdam", local_step_clipper=1), config)


def test_lamb_with_sharded_moments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage: expected 0 with OneBitLamb, got 1.*Set stage to 0"):
        check_one_bit_optimizer(made("OneBitLamb"), ZeroConfig(stage=1))
    check_one_bit_optimizer(made("OneBitLamb"), ZeroConfig(stage=0))


def test_a_schedule_that_ends_before_the_freeze_is_warned_of() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}
    config = ZeroConfig.from_mapping({"stage": 0, "scheduler": scheduler})
    betas = (0.9, 0.8)
    with pytest.warns(RuntimeWarning, match="frozen after step 50, but the scheduler ends at step 50"):
        check_one_bit_optimizer(made("OneBitAdam", freeze_step=50, betas=betas), config)
    check_one_bit_optimizer(made("OneBitAdam", freeze_step=8, betas=betas), config)


@pytest.mark.parametrize(
    ("freeze_step", "beta2", "warning"),
    [
        (75, 0.99, r"after step 75, .*0\.99 .*53% .*1\.4 times.*at least 138, .*at most 0\.981$"),
        (137, 0.99, "at least 138, "),
        (138, 0.99, ""),
        (75, 0.981, ""),
        (math.inf, 0.999, ""),
        (1, 0.0, ""),
    ],
)
def test_a_variance_frozen_while_it_grows_is_warned_of(
    freeze_step: float, beta2: float, warning: str
) -> None:
    optimizer = made("OneBitAdam", freeze_step=freeze_step, betas=(0.9, beta2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_one_bit_optimizer(optimizer, ZeroConfig.from_mapping({"stage": 0}))
    messages = [str(each.message) for each in caught]
    assert len(messages) == bool(warning) and all(re.search(warning, message) for message in messages), (
        messages
    )
