"""What a user's ``accelerate launch`` script looks like, with zero_ext.prepare() after Accelerator()."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import zero_ext
from tests.zero.models import TIME, VOCABULARY, TinyModel, language_loss

ACCUMULATION, CLIP, SAMPLES, BATCH = 2, 0.05, 24, 2


def build(seed: int) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, schedule and all ranks' ids [SAMPLES, TIME]."""
    torch.manual_seed(seed)
    model = TinyModel(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    return model, optimizer, schedule, torch.randint(0, VOCABULARY, (SAMPLES, TIME))


def main(seed: int, stage: int, folder: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model, optimizer, schedule, ids = build(seed)
    config = {"stage": stage, "batch": {"gradient_accumulation_steps": ACCUMULATION}}
    model, optimizer = zero_ext.prepare(model, optimizer, config, device=accelerator.device)
    # The loader only: model, optimizer and schedule stay as they are.
    loader = accelerator.prepare(DataLoader(TensorDataset(ids), batch_size=BATCH))
    untouched = model, optimizer, type(schedule), type(model.module)
    losses, norms = [], []
    for _ in range(2):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = language_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    assert (model, optimizer, type(schedule), type(model.module)) == untouched
    assert untouched[3] is TinyModel and accelerator._models == [] and accelerator._optimizers == []
    weights = zero_ext.full_state_dict(model)
    if accelerator.is_main_process:
        facts = {"losses": losses, "norms": norms, "ranks": accelerator.num_processes}
        (folder / f"facts-{stage}.json").write_text(json.dumps(facts))
        torch.save(weights, folder / f"weights-{stage}.pt")
    accelerator.wait_for_everyone()
    if stage == 3:
        refuses_a_sharded_model(accelerator, model)
    accelerator.end_training()


def refuses_a_sharded_model(accelerator: Accelerator, model: Any) -> None:
    """What happens to whoever gives the sharded model to Accelerate as well."""
    try:
        accelerator.prepare(model)
    except RuntimeError as error:
        print(f"refused: {error}", file=sys.stderr)
    else:
        raise AssertionError("accelerate wrapped a sharded model")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
