"""Train a small GPT with Lightning's Trainer and ZeRO-3, save it, and evaluate it in a new module.

    python examples/lightning_gpt.py            two ranks, under three minutes on two cores
    python examples/lightning_gpt.py --ci       a smaller model and less text, under 40 seconds

Lightning starts the second rank itself. The script exits with status 1 if the held-out loss does not fall far
enough, or if the loaded module has a different held-out loss.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from small_gpt import SmallGPT, language_loss, text_windows
from torch.utils.data import DataLoader

from zero_ext.integrations.lightning import ZeroStrategy

WINDOW = 128
FOLDER = Path("runs") / "lightning-gpt"


class GPTModule(LightningModule):
    """An ordinary LightningModule without ZeRO code."""

    def __init__(self, layers: int, width: int, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: SmallGPT | None = None

    def configure_model(self) -> None:
        """Build the model here, so that its parameters are sharded during initialization.

        No rank ever allocates the full model.
        """
        if self.model is None:
            self.model = SmallGPT(self.hparams.layers, self.hparams.width, WINDOW)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = language_loss(self.model, batch["input_ids"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("held_out_loss", language_loss(self.model, batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.hparams.steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(options: argparse.Namespace, steps: int, **arguments) -> Trainer:
    return Trainer(
        strategy=ZeroStrategy(stage=options.stage),
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        limit_val_batches=8,
        default_root_dir=FOLDER,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
        **arguments,
    )


def main(options: argparse.Namespace) -> int:
    # The second rank runs this file too, so each of the two ranks uses one core.
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    layers, width, steps, enough = (2, 64, 60, 0.75) if options.ci else (4, 128, 250, 0.55)
    training, held_out = text_windows(WINDOW, options.ci)
    loaders = DataLoader(training, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=8)

    saver = ModelCheckpoint(FOLDER, filename="{step}", monitor="held_out_loss", save_top_k=1)
    trainer = make_trainer(
        options, steps, callbacks=[saver], val_check_interval=steps // 2 * 2, check_val_every_n_epoch=None
    )
    trainer.fit(GPTModule(layers, width, steps), *loaders)

    again = make_trainer(options, steps)
    found = again.validate(GPTModule(layers, width, steps), loaders[1], saver.best_model_path, verbose=False)
    first, last = 5.545, float(saver.best_model_score)  # ln 256: all bytes are equally likely at first
    if trainer.is_global_zero:
        print(f"held-out loss: {first:.3f} before, {last:.3f} after {steps} steps on {options.devices} ranks")
        print(f"loaded from {saver.best_model_path}: {found[0]['held_out_loss']:.3f}")
    return 0 if last < enough * first and abs(found[0]["held_out_loss"] - last) < 1e-5 * last else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="train a smaller model on less text, under 40 s")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    sys.exit(main(parser.parse_args()))
