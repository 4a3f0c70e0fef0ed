"""The ways to train over a slow network that benchmarks set side by side, each with what it is judged by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import zero_ext
from benchmarks.harness.text_model import TextRun

BETAS = (0.9, 0.99)  # a memory shorter than the warm-up: the first, large gradients are forgotten at its end
Optimizer = Callable[[Iterable[nn.Parameter], TextRun, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Mode:
    """One way: an optimizer made of parameters, the run and the learning rate, and a config.

    `against` is the uncompressed way that it is judged by, `tolerance` the part by which its held-out loss
    may be above that one's where the spread of seeds is not larger.
    """

    name: str
    title: str
    optimizer: Optimizer
    config: dict[str, Any] = field(default_factory=dict)
    against: str | None = None
    tolerance: float = 0.01
    rate_factor: float = 1.0  # of the learning rate that Adam takes


def _adam(parameters: Iterable[nn.Parameter], run: TextRun, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.0)


def _one_bit_adam(parameters: Iterable[nn.Parameter], run: TextRun, rate: float) -> torch.optim.Optimizer:
    return zero_ext.OneBitAdam(parameters, lr=rate, betas=BETAS, freeze_step=run.warm_up_steps)


def _zero_one_adam(
    parameters: Iterable[nn.Parameter], run: TextRun, rate: float, var_update_scaler: int | None = None
) -> torch.optim.Optimizer:
    """The published policy of local steps of a run of 118,000 (Lu et al., arXiv 2202.06009, section 6), made
    shorter with the run: they begin where the variance is frozen and double their number four times. Until
    then every step updates the variance, unless told otherwise: signs of gradients as noisy as those of
    batches this small cost more than the bar allows."""
    return zero_ext.ZeroOneAdam(
        parameters,
        lr=rate,
        betas=BETAS,
        var_freeze_step=run.warm_up_steps,
        var_update_scaler=run.warm_up_steps if var_update_scaler is None else var_update_scaler,
        local_step_scaler=max(1, run.steps // 4),
        local_step_clipper=16,
    )


def _lamb(parameters: Iterable[nn.Parameter], run: TextRun, rate: float) -> torch.optim.Optimizer:
    return zero_ext.Lamb(parameters, lr=rate, betas=BETAS, weight_decay=0.0)


def _one_bit_lamb(parameters: Iterable[nn.Parameter], run: TextRun, rate: float) -> torch.optim.Optimizer:
    return zero_ext.OneBitLamb(parameters, lr=rate, betas=BETAS, freeze_step=run.warm_up_steps)


def _muon(parameters: Iterable[nn.Parameter], run: TextRun, rate: float) -> torch.optim.Optimizer:
    """Muon at AdamW's learning rate for the matrices of the blocks, AdamW for embedding, head and norms."""
    listed = list(parameters)
    for each in listed:
        each.use_muon = each.dim() == 2 and run.shape.vocabulary not in each.shape  # type: ignore[attr-defined]
    rest = {"lr": rate, "betas": BETAS, "weight_decay": 0.0}
    return zero_ext.Muon(listed, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", adamw=rest)


ZEROPP = {
    "ranks_per_node": 2,
    "quantized_weights": "int8",
    "quantized_gradients": "int4",
    "hierarchical_partition": True,
}
_IN_NODES = {"ranks_per_node": 2}

MODES = {
    mode.name: mode
    for mode in (
        Mode("adam", "Adam", _adam, {"stage": 0, "communication": _IN_NODES}),
        Mode("adam1", "Adam, ZeRO-1", _adam, {"stage": 1, "communication": _IN_NODES}),
        Mode("muon", "Muon, ZeRO-1", _muon, {"stage": 1, "communication": _IN_NODES}, "adam", tolerance=0.0),
        Mode("onebit_adam", "1-bit Adam", _one_bit_adam, {"stage": 0, "communication": _IN_NODES}, "adam"),
        Mode(
            "onebit_adam1",
            "1-bit Adam, ZeRO-1",
            _one_bit_adam,
            {"stage": 1, "communication": _IN_NODES},
            "adam",
        ),
        Mode("zero_one_adam", "0/1 Adam", _zero_one_adam, {"stage": 0, "communication": _IN_NODES}, "adam"),
        Mode(
            "zero_one_adam_16",
            "0/1 Adam, variance updated as published",
            partial(_zero_one_adam, var_update_scaler=16),
            {"stage": 0, "communication": _IN_NODES},
            "adam",
        ),
        Mode("lamb", "LAMB", _lamb, {"stage": 1, "communication": _IN_NODES}, rate_factor=5.0),
        Mode(
            "onebit_lamb",
            "1-bit LAMB",
            _one_bit_lamb,
            {"stage": 0, "communication": _IN_NODES},
            "lamb",
            rate_factor=5.0,
        ),
        Mode("zero3", "ZeRO-3", _adam, {"stage": 3, "communication": _IN_NODES}, "adam"),
        Mode("zeropp", "ZeRO++", _adam, {"stage": 3, "communication": ZEROPP}, "adam", tolerance=0.015),
    )
}


def mode_named(name: str) -> Mode:
    """The mode called `name`, or "muon@2": the mode with so many times its learning rate.

    ValueError with the known names otherwise.
    """
    base, _, factor = name.partition("@")
    if base not in MODES or ("@" in name and not re.fullmatch(r"\d+(\.\d+)?", factor)):
        raise ValueError(f"unknown mode {name!r}; known: {', '.join(MODES)}, and MODE@FACTOR")
    mode = MODES[base]
    if not factor:
        return mode
    title = f"{mode.title}, {factor} × its learning rate"
    return replace(mode, name=name, title=title, rate_factor=mode.rate_factor * float(factor))
