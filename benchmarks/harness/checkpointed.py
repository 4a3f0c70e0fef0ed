"""A rank whose layers are checkpointed, a step each way in turn: one model, one optimizer, one way at a time.

Driven by a team like :mod:`benchmarks.harness.worker`.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.harness.shapes import batch_for, shape_named
from benchmarks.harness.worker import main
from benchmarks.peers.base import nvme_folder
from benchmarks.peers.zero_ext_engine import ZeroExtTrainer
from zero_ext import full_gradient
from zero_ext.activation import ActivationCheckpointing
from zero_ext.config import ActivationCheckpointingConfig

COMMANDS = ("start", "compare", "steps", "modes")
TORCH = "torch.utils.checkpoint"


class Checkpointed:
    """State of this process: its trainer, and how its layers are checkpointed."""

    def start(
        self, shape: str, threads: int, tokens: int, modes: Mapping[str, dict[str, Any] | None]
    ) -> None:
        """Builds the trainer (one rank, stage 3). ``modes`` are policies by name; the one of None is torch's
        own checkpoint."""
        torch.set_num_threads(threads)
        self._shape, self._tokens, self._count = shape_named(shape), tokens, 0
        self._trainer = ZeroExtTrainer(self._shape, stage=3)
        model = self._trainer.model.module
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = [each for each in model.modules() if hasattr(each, "_gradient_checkpointing_func")]
        self._modes = {name: self._checkpointing_of(values) for name, values in modes.items()}
        self._peak_saved = dict.fromkeys(modes, 0)

    def _checkpointing_of(self, values: dict[str, Any] | None) -> ActivationCheckpointing | None:
        if values is None:
            return None
        paths = (nvme_folder(),) if values.get("tier") == "nvme" else ()
        return ActivationCheckpointing(ActivationCheckpointingConfig(**values, nvme_paths=paths))

    def compare(self) -> dict[str, bool]:
        """Whether all gradients of the same batch, without an update between, are torch's to the bit."""
        rates = [group["lr"] for group in self._trainer.optimizer.param_groups]
        for group in self._trainer.optimizer.param_groups:
            group["lr"] = 0.0
        found: dict[str, bytes] = {}
        for name in self._modes:
            self._count = 0
            _, found[name] = self._step(name, self._gradients)
        for group, rate in zip(self._trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return {name: digest == found[TORCH] for name, digest in found.items()}

    def _gradients(self) -> bytes:
        digest = hashlib.sha256()
        for parameter in self._trainer.model.parameters():
            gradient = full_gradient(parameter)
            if gradient is None:
                raise AssertionError(f"a parameter of {parameter.numel()} elements has no gradient")
            digest.update(gradient.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def steps(self, repeats: int, seed: int) -> dict[str, list[float]]:
        """Seconds of ``repeats`` steps of every way, in random order."""
        chance = random.Random(seed)
        seconds: dict[str, list[float]] = {name: [] for name in self._modes}
        gc.collect()
        gc.disable()
        for _ in range(repeats):
            for name in chance.sample(list(self._modes), len(self._modes)):
                seconds[name].append(self._step(name)[0])
        gc.enable()
        return seconds

    def modes(self) -> dict[str, dict[str, Any]]:
        """What each way has kept at most after a forward, and what memory it holds for that, in bytes."""
        return {
            name: {
                "layers": len(self._layers) - 1,
                "input": self._tokens * self._shape.configuration().hidden_size * 2,
                "saved": self._peak_saved[name],
                "held": checkpointing.allocated_bytes() if checkpointing is not None else {},
            }
            for name, checkpointing in self._modes.items()
        }

    def _step(self, name: str, look: Callable[[], bytes] = bytes) -> tuple[float, bytes]:
        """Seconds of one step, and what ``look`` makes of its gradients."""
        checkpointing = self._modes[name]
        for layer in self._layers:
            layer._gradient_checkpointing_func = checkpointing if checkpointing is not None else _by_torch
        tokens = batch_for(self._shape, 0, self._count, self._tokens)
        self._count += 1
        began = time.perf_counter()
        loss = self._trainer.model(input_ids=tokens, labels=tokens).loss
        middle = time.perf_counter()
        saved = checkpointing.used_bytes() if checkpointing is not None else 0
        resumed = time.perf_counter()
        loss.backward()
        seen = look()
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        self._peak_saved[name] = max(self._peak_saved[name], saved)
        return time.perf_counter() - began - (resumed - middle), seen

    def close(self) -> None:
        """The model goes."""
        self._modes.clear()
        self._trainer.close()


def _by_torch(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


if __name__ == "__main__":
    main(Checkpointed(), COMMANDS)
