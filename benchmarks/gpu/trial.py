"""One trial to train a model under a cap on the device's memory, as a process of its own.

python -m benchmarks.gpu.trial '<json>' prints one line of JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import zero_ext
from benchmarks.gpu.gpt import GPT, GPTShape, fill, tokens_for
from benchmarks.gpu.placement import Placement, choices, optimizer_of
from benchmarks.harness.shapes import WEIGHT_SEED
from zero_ext.zero import engine_of


@dataclass
class Trial:
    """What was asked, what was predicted and what came.

    Attributes:
        parameters: of the model.
        trained: all steps ended with a finite loss.
        reason: why not.
        placement: in words, with the predicted bytes of each tier in `predicted`.
        batch: sequences a step.
        peak: bytes, by the allocator, on the device.
        held: bytes by tier and kind after the steps, by the engine's own account.
        prepare_seconds: until the model was ready. step_seconds: of every step.
        teraflops: of the last step, without what checkpointing repeats.
    """

    parameters: int
    trained: bool = False
    reason: str = ""
    placement: str = ""
    predicted: dict[str, int] | None = None
    batch: int = 0
    peak: int = 0
    held: dict[str, Any] | None = None
    prepare_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    teraflops: float = 0.0


def cap_memory(device: torch.device, nbytes: int) -> None:
    """Holds torch's allocator to `nbytes`; on the CPU nothing is held."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors on the device took."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def choose_placement(shape: GPTShape, cap: int, host: int, disk: int, moments: str) -> Placement | None:
    """The first placement whose predicted bytes fit; all are told on stderr."""
    for placement in choices(shape, cap, moments):
        fits = placement.fits(cap, host, disk)
        print(f"{shape.name}, {placement.text()}{', taken' if fits else ''}", file=sys.stderr, flush=True)
        if fits:
            return placement
    return None


def prepared(shape: GPTShape, placement: Placement) -> tuple[Any, Any]:
    """The model in its tiers with random values, unit by unit, and its optimizer."""
    with torch.device("meta"):
        model = GPT(shape, checkpointing=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), placement.configuration(), init="skip")
    for unit in engine_of(model).units:
        with zero_ext.gathered(unit.parameters, modifier_rank=0):
            fill([(names[parameter], parameter) for parameter in unit.parameters], WEIGHT_SEED)
    return model, optimizer


def train(
    shape: GPTShape, device: torch.device, placement: Placement, cap: int, batch: int, steps: int
) -> Trial:
    """Prepare and train; an error is in the trial's reason."""
    trial = Trial(shape.parameters, placement=placement.name, batch=placement.sequences(cap, batch))
    trial.predicted = {tier: getattr(placement, tier) for tier in ("device", "host", "nvme")}
    try:
        began = time.perf_counter()
        model, optimizer = prepared(shape, placement)
        trial.prepare_seconds = time.perf_counter() - began
        print(f"prepared in {trial.prepare_seconds:.1f} s, batch {trial.batch}", file=sys.stderr, flush=True)
        for number in range(steps):
            began = time.perf_counter()
            loss = model(tokens_for(shape, trial.batch, number, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trial.losses += (loss.item(),)
            trial.step_seconds += (time.perf_counter() - began,)
            print(
                f"step in {trial.step_seconds[-1]:.1f} s, loss {trial.losses[-1]:.3f}",
                file=sys.stderr,
                flush=True,
            )
        tokens = trial.batch * shape.positions
        trial.teraflops = shape.operations(tokens) / trial.step_seconds[-1] / 1e12
        trial.held = held(model)
        trial.trained = all(math.isfinite(loss) for loss in trial.losses)
        trial.reason = "" if trial.trained else "a loss is not finite"
    except (RuntimeError, MemoryError, OSError) as error:
        trial.reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    trial.peak = peak_bytes(device)
    return trial


def held(model: Any) -> dict[str, Any]:
    """Bytes by kind, by the engine's account."""
    return dict(engine_of(model).memory_breakdown())


def main(request: dict[str, Any]) -> Trial:
    """The trial that `request` describes: shape, device, cap, host, disk, batch, steps, moments."""
    shape, device = GPTShape(**request["shape"]), torch.device(request["device"])
    cap_memory(device, request["cap"])
    placement = choose_placement(shape, *(request[name] for name in ("cap", "host", "disk", "moments")))
    if placement is None:
        return Trial(shape.parameters, reason="no placement is predicted to fit this machine")
    return train(shape, device, placement, request["cap"], request["batch"], request["steps"])


if __name__ == "__main__":
    print(json.dumps(asdict(main(json.loads(sys.argv[1])))), flush=True)
