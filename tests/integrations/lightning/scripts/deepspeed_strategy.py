"""An ordinary script of Lightning's DeepSpeedStrategy, Trainer and Fabric: ``deepspeed_strategy.py OUT``.

It knows nothing of zero_ext. Lightning runs the strategy on CUDA alone, which this machine need not have.
"""

import gc
import json
import logging
import sys
import warnings
from pathlib import Path

import deepspeed
import lightning.fabric.strategies.deepspeed as fabric_strategy
import lightning.pytorch.strategies.deepspeed as trainer_strategy
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WIDTH, SAMPLES = 8, 24
for module in (fabric_strategy, trainer_strategy):
    module.CUDAAccelerator = fabric_strategy.Accelerator
    module._validate_device_index_selection = lambda devices: None
for kind in (CPUAccelerator, FabricCPU):
    kind.get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)] * devices)
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def loader(seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(-1, keepdim=True)), batch_size=4)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def with_trainer(stage: int, folder: Path) -> dict:
    """Fit, test, fit once more, and a fit of a new module from a checkpoint of the first."""
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)

    def made(epochs: int, **more: object) -> Trainer:
        return Trainer(
            strategy=f"deepspeed_stage_{stage}",
            accelerator="cpu",
            devices=2,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **more,
        )

    module = Regression()
    trainer = made(2, callbacks=[keep], gradient_clip_val=0.5)
    trainer.fit(module, loader(1), loader(2))
    tested = trainer.test(module, loader(3), verbose=False)[0]["test"]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(4))
    accumulating = made(1, accumulate_grad_batches=2, enable_checkpointing=False)
    accumulating.fit(module, loader(5))
    other = Regression()
    resumed = made(2, callbacks=[ModelCheckpoint(folder / "resumed")], gradient_clip_val=0.5)
    resumed.fit(other, loader(1), loader(2), ckpt_path=str(folder / "epoch=0.ckpt"))
    return {"losses": module.losses, "tested": tested, "resumed": other.losses}


def with_fabric(stage: int) -> dict:
    """Two phases with two optimizers over one network, with evaluation between."""
    fabric = Fabric(strategy=f"deepspeed_stage_{stage}", accelerator="cpu", devices=2)
    fabric.launch()
    net, losses = network(), []
    for phase, rate in enumerate((0.01, 0.002)):
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=rate))
        data = fabric.setup_dataloaders(loader(10 + phase))
        for batch in data:
            loss = functional.mse_loss(model(batch[0]), batch[1])
            losses.append(loss.item())
            fabric.backward(loss, model=model)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [functional.mse_loss(model(batch[0]), batch[1]).item() for batch in data]
    return {"losses": losses}


def main() -> None:
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    folder = Path(sys.argv[1])
    found = {"file": deepspeed.__file__}
    for stage in (2, 3):
        found[f"trainer-{stage}"] = with_trainer(stage, folder / f"stage-{stage}")
        found[f"fabric-{stage}"] = with_fabric(stage)
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


main()
