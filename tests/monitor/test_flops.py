"""Operations: counted, by formula, and by hand."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import zero_ext
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor import Flops, count_flops, peak_of, transformer_flops
from zero_ext.zero import engine_of


def test_counted_by_hand() -> None:
    layer, inputs = nn.Linear(5, 7, bias=False), torch.randn(3, 5)
    assert count_flops(lambda: layer(inputs)) == 2 * 3 * 5 * 7
    assert count_flops(lambda: layer(inputs).sum().backward()) == 2 * 2 * 3 * 5 * 7  # no input gradient
    inputs.requires_grad_()
    assert count_flops(lambda: layer(inputs).sum().backward()) == 3 * 2 * 3 * 5 * 7
    query, key = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 32, 8)
    attention = count_flops(lambda: functional.scaled_dot_product_attention(query, key, key))
    assert attention == 2 * (2 * 2 * 3 * 16 * 32 * 8)


def test_counted_as_torch_does() -> None:
    model = TinyModel()
    batch = language_batch(1, 0, 0, 0)
    with FlopCounterMode(display=False) as counter:
        language_loss(model, batch).backward()
    assert count_flops(lambda: language_loss(model, batch).backward()) == counter.get_total_flops() > 0


def test_the_formula() -> None:
    assert transformer_flops(1000, 10) == 60_000
    assert transformer_flops(1000, 10, layers=2, hidden=8, sequence=16) == 60_000 + 12 * 2 * 8 * 16 * 10


def test_peaks_by_name() -> None:
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("cpu") is None


class Layers(nn.Module):
    """Two square layers; forward raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](inputs)
        if self.fails:
            raise ValueError("told to")
        return self.layers[1](hidden)


FORWARD = 2 * 2 * 4 * 6 * 6  # two layers, batch of 4


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_prepared_model_is_counted_once(frozen: int, micro_steps: int) -> None:
    model = Layers()
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {"stage": 3, "batch": {"gradient_accumulation_steps": micro_steps}}
    prepared, optimizer = zero_ext.prepare(model, optimizer, settings)
    own = len(model._forward_hooks) - hooks[0], len(model._forward_pre_hooks) - hooks[1]
    flops = Flops(engine_of(prepared), peak=1e9)
    rows = []

    def keep(event: Event) -> None:
        flops(event)
        if isinstance(event, StepEnd):
            rows.append((event.seconds, flops.values(event)))

    engine_of(prepared).subscribe(keep)
    with torch.no_grad():
        prepared(torch.randn(100, 6))  # not a training forward
    model.fails = True
    with pytest.raises(ValueError, match="told to"):
        prepared(torch.randn(4, 6))
    model.fails = False
    for _ in range(3):
        for _ in range(micro_steps):
            prepared(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    factor = 3 - frozen / 2
    tried = [1, 0, 0]  # the forward that raised
    for (seconds, row), more in zip(rows, tried, strict=True):
        wanted = FORWARD * factor * (micro_steps + more)
        assert row["flops/step"] == wanted
        assert row["flops/teraflops"] == pytest.approx(wanted / seconds * 1e-12)
        assert row["flops/mfu"] == pytest.approx(wanted / seconds / 1e9)
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (
        hooks[0] + own[0],
        hooks[1] + own[1],
    )


def test_configured_operations_are_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    prepared, _ = zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hooks = len(model._forward_hooks)
    with caplog.at_level(logging.WARNING, logger="zero_ext"):
        flops = Flops(engine_of(prepared), per_step=5e9)
    assert "device 'cpu' is not known" in caplog.text and "monitor.flops.peak" in caplog.text
    assert len(model._forward_hooks) == hooks
    row = flops.values(StepEnd(1, None, None, (), False, 1.0, 2.0))
    assert row == {"flops/step": 5e9, "flops/teraflops": 2.5e-3, "flops/mfu": None}
