"""The hot paths: a table of training runs on two ranks, and the phases of a step whose work is counted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_ext
from scripts.work_counts.counting import Counts, opcodes_of, operations_of

BLOCKS, WIDTH, TOKENS = 4, 32, 4
# The first steps record the order of units, and the engine acts on it from then on.
WARM_UP_STEPS = 5
STEP = ("forward", "backward", "update")


class Block(nn.Module):
    """A residual block of six parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        return hidden + self.down(self.up(self.norm(hidden)).relu())


class Blocks(nn.Module):
    """A stack of them under a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to a loss."""
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).float().square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of most paths."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    return zero_ext.Muon(model.parameters(), lr=1e-3, adamw={"lr": 1e-3}, module=model)


@dataclass(frozen=True)
class HotPath:
    """A run and the counts that it yields: by their name, the phases of a step that each sums up."""

    rows: Mapping[str, tuple[str, ...]]
    config: Mapping[str, Any]
    micro_batches: int = 1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(default=adamw)

    @property
    def phases(self) -> set[str]:
        """Phases that any row sums up."""
        return {phase for row in self.rows.values() for phase in row}


NVME = {"params": "nvme", "grads": "host", "optimizer": "nvme"}
PATHS = (
    HotPath({"stage 1, step": STEP, "checkpoint, save": ("save",)}, {"stage": 1}),
    HotPath({"stage 2, step of two micro-batches": STEP}, {"stage": 2}, micro_batches=2),
    HotPath(
        {
            "stage 3, prepare": ("prepare",),
            "stage 3, forward": ("forward",),
            "stage 3, backward": ("backward",),
            "stage 3, optimizer step": ("update",),
        },
        {"stage": 3},
    ),
    HotPath(
        {"host memory, optimizer step": ("update",)},
        {"stage": 2, "offload": {"grads": "host", "optimizer": "host"}},
    ),
    HotPath({"NVMe, step": STEP}, {"stage": 3, "offload": NVME}),
    HotPath(
        {"clipping and loss scaling, optimizer step": ("update",)},
        {
            "stage": 2,
            "precision": {"dtype": "fp16"},
            "gradient_clipping": 0.1,
            "loss_scale": {"initial_power": 4},
        },
    ),
    HotPath({"Muon, optimizer step": ("update",)}, {"stage": 3}, optimizer=muon),
)


class _Run:
    """One training run of a path, with a method for each phase."""

    def __init__(self, path: HotPath, folder: Path) -> None:
        self._path, self._folder = path, folder
        offload = dict(path.config.get("offload", {}))
        if "nvme" in offload.values():
            offload |= {"nvme_paths": [str(folder)], "staging_buffer_bytes": 1 << 20}
        batch = {"gradient_accumulation_steps": path.micro_batches}
        units = {"persistence_threshold": 0}
        self._config = {**path.config, "offload": offload, "batch": batch, "units": units}
        self._saves = 0
        self.fresh()

    def fresh(self) -> None:
        """Build the model that `prepare` shards."""
        torch.manual_seed(0)
        self._plain = Blocks()
        self._inputs = torch.randn(TOKENS, WIDTH)
        self._own_optimizer = self._path.optimizer(self._plain)

    def prepare(self) -> None:
        self._model, self._optimizer = zero_ext.prepare(self._plain, self._own_optimizer, self._config)
        self._inputs = self._inputs.to(next(self._model.parameters()).dtype)

    def forward(self) -> None:
        self._loss = self._model(self._inputs)

    def backward(self) -> None:
        self._model.backward(self._loss)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self) -> None:
        self._saves += 1
        folder = self._folder / f"save-{self._saves}"
        zero_ext.save_checkpoint(folder, self._model, async_save=False).wait()

    def count(self, counter: Callable[[Callable[[], object]], Counts], save: bool) -> dict[str, Counts]:
        """Work of each phase of a step, summed over the micro-batches."""
        del self._loss
        gc.collect()
        found: dict[str, Counts] = {}
        phases = ["forward", "backward"] * self._path.micro_batches + ["update"] + ["save"] * save
        for phase in phases:
            found[phase] = total((found.get(phase, {}), counter(getattr(self, phase))))
        return found

    def step(self) -> None:
        """A step that is not counted."""
        for _ in range(self._path.micro_batches):
            self.forward()
            self.backward()
        self.update()


def total(counts: Iterable[Counts]) -> Counts:
    """Sum counts unit by unit."""
    found: Counts = {}
    for each in counts:
        for unit, count in each.items():
            found[unit] = found.get(unit, 0) + count
    return found


def count_path(path: HotPath, folder: Path) -> list[dict[str, Counts]]:
    """Two counts of a path's rows on this rank; all ranks call it with the same path and an empty folder.

    Opcodes and operations are counted in different steps, as each counter adds work of its own.
    """
    prepares, save = "prepare" in path.phases, "save" in path.phases
    run = _Run(path, folder)
    run.prepare()
    for _ in range(WARM_UP_STEPS):
        run.step()
    if save:
        run.save()
    found: list[dict[str, Counts]] = []
    for _ in range(2):
        by_phase: dict[str, Counts] = {}
        for counter in (opcodes_of, operations_of):
            counted = run.count(counter, save)
            if prepares:
                fresh = _Run(path, folder)
                gc.collect()
                counted["prepare"] = counter(fresh.prepare)
                del fresh
            for phase, counts in counted.items():
                by_phase[phase] = by_phase.get(phase, {}) | counts
        found.append({name: total(by_phase[each] for each in row) for name, row in path.rows.items()})
    return found
