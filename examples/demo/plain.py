"""Run the same steps in a plain loop in one process without ZeRO, as the reference for all stages.

The loop uses ordinary mixed precision: bf16 parameters, and fp32 master weights that the optimizer updates.
It splits the global batch into as many micro-batches as the other runs have ranks, so that gradients are
rounded to bf16 at the same points.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from demo.corpus import ByteWindows, Corpus
from demo.language_model import build_model, build_optimizer
from demo.record import write_record
from demo.settings import SETTINGS
from zero_ext.data import ShardedLoader


class MasterWeights:
    """fp32 copies of bf16 parameters that the optimizer updates instead of them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        for parameter in self.parameters:  # model.to() would convert the rotary frequencies
            parameter.data = parameter.data.to(torch.bfloat16)
        self.optimizer = build_optimizer(self.masters, SETTINGS)

    @torch.no_grad()
    def step(self) -> None:
        """Clip and apply the bf16 gradients, then round the master weights into the parameters."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, SETTINGS.clip)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of each state kind, measured on the tensors.

        The gradients count with the size of the parameters, because `step` has already released them.
        """
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        owned: list[Tensor] = [*self.masters, *(value for value in moments if value.dim())]
        params = sum(parameter.nbytes for parameter in self.parameters)
        return {"params": params, "grads": params, "optimizer": sum(tensor.nbytes for tensor in owned)}


def main(folder: Path) -> None:
    windows = ByteWindows(Corpus.read(folder).training, SETTINGS.window)
    model = build_model(SETTINGS)
    training = MasterWeights(model)
    count = SETTINGS.ranks
    losses, seconds = [], []
    loader = ShardedLoader(windows, SETTINGS.global_batch, seed=SETTINGS.seed)
    for _, batch in zip(range(SETTINGS.compared_steps), loader, strict=False):
        began = time.perf_counter()
        step_losses = []
        for share in batch["input_ids"].chunk(count):
            loss = model(input_ids=share, labels=share).loss
            (loss / count).backward()
            step_losses.append(loss.item())
        training.step()
        seconds.append(time.perf_counter() - began)
        losses.append(sum(step_losses) / count)
    record = {"losses": losses, "seconds": statistics.median(seconds[1:]), "bytes": training.state_bytes()}
    write_record(folder, "plain", 0, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
