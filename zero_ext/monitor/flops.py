"""Floating-point operations: counted or by formula, a second, and as a part of the device's peak."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_ext.config.events import Event, PhaseEnd, StepEnd
from zero_ext.monitor.sources import Value
from zero_ext.zero.engine import Engine

# Dense operations a second in 16 bits with sums in 32, by a part of the device's name: the makers' data
# sheets. The first that fits counts.
PEAKS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2250e12,
        "H200": 989e12,
        "H100 PCIe": 756e12,
        "H100": 989e12,
        "A100": 312e12,
        "A40": 149.7e12,
        "A10": 125e12,
        "L40S": 362e12,
        "L4": 121e12,
        "V100": 125e12,
        "T4": 65e12,
        "RTX 4090": 165.2e12,
        "RTX 3090": 71e12,
        "MI300X": 1307e12,
        "MI250X": 383e12,
    }
)
_log = logging.getLogger("zero_ext")


def peak_of(name: str) -> float | None:
    """Return the peak rate of a device in 16 bits with sums in 32, as its maker states it.

    Args:
        name: of the device, such as "NVIDIA H100 80GB HBM3".

    Returns:
        Floating-point operations per second; None if the table does not have the device.
    """
    return next((peak for model, peak in PEAKS.items() if model in name), None)


def transformer_flops(
    parameters: int, tokens: int, *, layers: int = 0, hidden: int = 0, sequence: int = 0
) -> int:
    """Return the operations of forward and backward of a decoder.

    They are 6 for each parameter and token, and 12 × layers × hidden × sequence for each token's attention.

    Source: Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B.

    Args:
        parameters: those that take part in matrix products, without embeddings that are looked up.
        tokens: number of tokens.
        layers: of the decoder; 0 leaves attention out.
        hidden: width of a layer.
        sequence: tokens of a sequence.

    Returns:
        Floating-point operations.

    Examples:
        >>> from zero_ext.monitor import transformer_flops
        >>> transformer_flops(parameters=1000, tokens=10)
        60000
    """
    return 6 * parameters * tokens + 12 * layers * hidden * sequence * tokens


def count_flops(call: Callable[[], object]) -> int:
    """Count the operations of the matrix products, convolutions and attentions that `call` runs.

    Recomputed ones are included. They are counted by torch's formulas (`torch.utils.flop_counter`).

    Args:
        call: runs what is to be counted, such as a forward and a backward.

    Returns:
        Floating-point operations.
    """
    with _Counting() as counting:
        call()
    return counting.flops


class _Counting(TorchDispatchMode):
    """Adds up what torch's registry says of each operator.

    torch's own counter follows modules by global hooks, so it cannot begin between a module's hooks.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        formula = flop_registry.get(packet)
        if packet is not None and formula is None and packet is not torch.ops.prim.device:
            with self:
                out = func.decompose(*args, **options)
            if out is not NotImplemented:
                return out
        out = func(*args, **options)
        if formula is not None:
            self.flops += int(formula(*args, **options, out_val=out))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += int(sdpa_flop_count(*(each.shape for each in args[:3])))
        return out


class Flops:
    """Source of a rank's operations per second.

    `flops/step` are operations, `flops/teraflops` is the rate, and `flops/mfu` is the rate over `peak`, None
    without a peak. They are the model's: what activation checkpointing computes again does not count. Without
    `per_step` the first training forward of the whole model is counted, by torch's formulas. Backward counts
    as twice that, and as once for the share of the parameters that is frozen. All training forwards of a step
    count alike, so inputs of varying shape need `per_step`.

    Args:
        engine: the engine of the model.
        peak: operations per second of the device; None looks its name up as `peak_of`.
        per_step: operations of one step on this rank.
    """

    def __init__(self, engine: Engine, peak: float | None = None, per_step: float | None = None) -> None:
        self._peak = peak or _peak_of_device(engine.device)
        self._per_step = per_step
        self._forwards = 0
        self._last_forwards = 0
        self._measured: _OneForward | None = None
        if per_step is None:
            sizes = [(p.numel(), p.requires_grad) for p in engine.index]
            share = sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)
            self._factor = 2.0 + share
            self._measured = _OneForward(engine.model)

    @property
    def per_step(self) -> float | None:
        """Operations of the last step on this rank; None before they were counted."""
        if self._measured is None:
            return self._per_step
        forward = self._measured.flops
        return None if forward is None else forward * self._factor * self._last_forwards

    def __call__(self, event: Event) -> None:
        """Count forwards.

        Args:
            event: any event of the engine.
        """
        if isinstance(event, PhaseEnd):
            self._forwards += event.phase == "forward" and event.trains
        elif isinstance(event, StepEnd):
            self._last_forwards, self._forwards = self._forwards, 0

    def values(self, end: StepEnd) -> dict[str, Value]:
        """Return the rates of a step.

        Args:
            end: the end of the step.

        Returns:
            Values by name.
        """
        flops = self.per_step
        rate = flops / end.seconds if flops is not None and end.seconds > 0 else None
        return {
            "flops/step": flops,
            "flops/teraflops": None if rate is None else rate * 1e-12,
            "flops/mfu": None if rate is None or self._peak is None else rate / self._peak,
        }


def _peak_of_device(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_of(name)
    if peak is None:
        _log.warning(
            "MFU is left out: the peak of device '%s' is not known; set monitor.flops.peak to its "
            "operations per second",
            name,
        )
    return peak


class _OneForward:
    """Counts the operations of the next training forward of ``model``, then is gone from it."""

    def __init__(self, model: nn.Module) -> None:
        self.flops: int | None = None
        self._counting: _Counting | None = None
        self._hooks = (
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        )

    def _begin(self, module: nn.Module, args: object) -> None:
        if self._counting is None and torch.is_grad_enabled():
            self._counting = _Counting()
            self._counting.__enter__()

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        counting, self._counting = self._counting, None
        if counting is None:
            return
        counting.__exit__(None, None, None)
        if output is not None:  # a forward that raised does not count
            self.flops = counting.flops
            for hook in self._hooks:
                hook.remove()
