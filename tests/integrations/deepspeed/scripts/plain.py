"""An ordinary DeepSpeed training script: ``plain.py CONFIGS.json OUT_FOLDER``. It knows nothing of
zero_ext."""

import gc
import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 61)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(
            self.head(hidden)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )


def engine_of(config):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config))
    return engine


def train(engine, steps, first, losses):
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    for number in range(first, first + steps * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 + number)
        batch = torch.randint(0, 61, (4 * world, 12), generator=generator)[rank * 4 : rank * 4 + 4]
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone().float()
        deepspeed.comm.all_reduce(total)
        losses.append(total.item() / world)


def run(config, folder):
    losses = []
    engine = engine_of(config)
    train(engine, 4, 0, losses)
    engine.save_checkpoint(str(folder), client_state={"seen": 4})
    train(engine, 2, 100, losses)
    norm = engine.get_global_grad_norm()
    resumed = engine_of(config)
    path, client = resumed.load_checkpoint(str(folder))
    assert path is not None
    again = []
    train(resumed, 2, 100, again)
    return {
        "losses": losses,
        "again": again,
        "norm": float(norm),
        "lr": resumed.get_lr(),
        "global_steps": resumed.global_steps,
        "client": client["seen"],
        "latest": (folder / "latest").read_text(),
    }


def main():
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    configs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    deepspeed.init_distributed(dist_backend="gloo")
    found = {name: run(config, folder / name) for name, config in configs.items()}
    found["file"] = deepspeed.__file__
    if deepspeed.comm.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
