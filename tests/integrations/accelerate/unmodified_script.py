"""A script with Accelerate as people write it, without zero_ext: ``unmodified_script.py OUT_FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    inputs, labels = torch.randn(48, 12), torch.randn(48, 3)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    for _ in range(2):
        for batch, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        engine = vars(accelerator.unwrap_model(model)).get("_zero_ext_engine")
        found = {
            "losses": losses,
            "weights": {name: value.tolist() for name, value in weights.items()},
            "stage": None if engine is None else engine.config.stage,
            "ranks": accelerator.num_processes,
        }
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
