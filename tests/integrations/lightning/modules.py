"""LightningModules, their data and Trainers for the tests."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.multi.rank import World
from tests.zero.models import TIME, VOCABULARY, TinyModel, language_loss
from zero_ext.config.events import Event, ReduceEvent
from zero_ext.integrations.lightning import ZeroStrategy
from zero_ext.zero import engine_of

SAMPLES = 24


class Language(LightningModule):
    """The tiny language model, tied: it notes every training loss, and what evaluation returned."""

    def __init__(self, seed: int, rate: float = 0.01, in_configure_model: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seed, self.rate = seed, rate
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.reductions: Counter[str] = Counter()  # of each unit
        self.model: nn.Module | None = None if in_configure_model else self.build()

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return TinyModel(tied=True)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def on_fit_start(self) -> None:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            engine_of(self).subscribe(self.record)

    def record(self, event: Event) -> None:
        if isinstance(event, ReduceEvent):
            self.reductions[event.unit] += 1

    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.model is not None
        return language_loss(self.model, batch[0])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        assert self.model is not None
        found: torch.Tensor = self.model(batch[0])
        return found

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(seed: int, batch_size: int = 2, samples: int = SAMPLES) -> DataLoader[Any]:
    """Ids [batch_size, TIME] in a fixed order."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(0, VOCABULARY, (samples, TIME), generator=generator)
    return DataLoader(TensorDataset(ids), batch_size=batch_size)


def enter(world: World) -> None:
    """Makes this rank look like one that torchrun started, and Lightning silent."""
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(world.size),
        TORCHELASTIC_RUN_ID="tests",
    )
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def trainer(world: World, strategy: Any, folder: Any = None, **arguments: Any) -> Trainer:
    """A Trainer on the CPU that neither logs nor, without a ``folder``, saves."""
    if folder is None:
        arguments.setdefault("enable_checkpointing", False)
    arguments.setdefault("logger", False)
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world.size,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def largest_difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two curves of the same length."""
    assert len(found) == len(wanted) > 0
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))
