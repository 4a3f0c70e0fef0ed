"""An ordinary DeepSpeed script, which imports deepspeed and does not mention zero_ext.

It trains a byte-level language model on Python's own documentation with ZeRO-3, saves a checkpoint, resumes
from it, and checks that the resumed run has the same losses as the uninterrupted one.

    zero-ext run --nproc-per-node 2 --deepspeed-compat examples/deepspeed_script.py --deepspeed

`--ci` trains for fewer steps. `--deepspeed_config FILE` replaces the configuration in this file.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional

BYTES, WIDTH, HEADS, BLOCKS, LENGTH = 256, 96, 4, 3, 96
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 20,
}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [batch, time, width] to the same shape."""
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed(self.norms[1](hidden))


class LanguageModel(nn.Module):
    """A transformer that maps bytes [batch, time + 1] to the mean loss of predicting each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte."""
        inputs, wanted = text[:, :-1], text[:, 1:]
        hidden = self.embed(inputs) + self.positions(torch.arange(LENGTH, device=text.device))
        for block in self.blocks:
            hidden = deepspeed.checkpointing.checkpoint(block, hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), wanted.flatten())


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of the language documentation, int64 [LENGTH + 1]."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * LENGTH : index * LENGTH + LENGTH + 1]


def start(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return a new engine and its data loader."""
    torch.manual_seed(0)
    options = {"args": arguments} if arguments.deepspeed_config else {"config": CONFIG}
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config or CONFIG):
        model = LanguageModel()
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=Windows(), **options)
    return engine, loader


def train(engine: Any, loader: Any, last_step: int) -> list[float]:
    """Train until ``last_step`` and return the loss of every step."""
    losses, micro = [], []
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    while engine.global_steps < last_step:
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        engine.step()
        micro.append(loss.item())
        if len(micro) == engine.gradient_accumulation_steps():
            losses.append(sum(micro) / len(micro))
            micro.clear()
    return losses


def main() -> None:
    """Train, save, train four more steps, and repeat those four steps from the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ci", action="store_true", help="train for fewer steps")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "deepspeed-script")
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    steps = 24 if arguments.ci else 160
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    if rank == 0:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    deepspeed.comm.barrier()
    engine, loader = start(arguments)
    losses = train(engine, loader, steps)
    engine.save_checkpoint(arguments.folder, client_state={"losses": losses})
    after = train(engine, loader, steps + 4)
    del engine, loader
    resumed, loader = start(arguments)
    path, client = resumed.load_checkpoint(arguments.folder)
    again = train(resumed, loader, steps + 4)
    if rank == 0:
        print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} after {steps} steps")
        print(f"resumed from {path}: losses {'equal' if again == after else f'differ: {after} {again}'}")
    # Every rank loads the client state that rank 0 saved, so only rank 0 can compare it with its own losses.
    if (rank == 0 and client["losses"] != losses) or again != after or losses[-1] > 0.8 * losses[0]:
        raise SystemExit("FAILED: the resumed run differs from the first, or the loss did not fall enough")


if __name__ == "__main__":
    main()
