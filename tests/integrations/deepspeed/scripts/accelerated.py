"""An ordinary Accelerate script: ``accelerated.py OUT_FOLDER``. Its engine and JSON come from the
environment."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from torch import nn


def model_of():
    set_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 3))


def train(accelerator, model, optimizer, scheduler, loader):
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def main():
    out = Path(sys.argv[1])
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[gloo])
    generator = torch.Generator().manual_seed(11)
    data = torch.utils.data.TensorDataset(
        torch.randn(20, 12, generator=generator), torch.randn(20, 3, generator=generator)
    )
    model = model_of()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    # Five micro-batches: Accelerate ends the last step early, at the end of the loader.
    losses = train(accelerator, model, optimizer, scheduler, loader)
    accelerator.save_state(str(out / "state"))
    after = train(accelerator, model, optimizer, scheduler, loader)
    accelerator.load_state(str(out / "state"))
    again = train(accelerator, model, optimizer, scheduler, loader)
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    found = {
        "losses": losses,
        "after": after,
        "again": again,
        "engine": type(model).__module__,
        "unwrapped": type(unwrapped).__name__,
        "type": accelerator.distributed_type.value,
    }
    if accelerator.is_main_process:
        found["shapes"] = {name: list(value.shape) for name, value in state.items()}
        (out / "found.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
