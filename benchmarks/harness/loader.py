"""A process that loads a model from safetensors: this project's shards, or transformers' whole model.

Driven by a team like :mod:`benchmarks.harness.worker`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_ext
from benchmarks.harness import process_memory
from benchmarks.harness.shapes import WEIGHT_SEED, default_dtype, shape_named
from benchmarks.harness.worker import main
from zero_ext.integrations.transformers import from_pretrained

CONFIG = {"stage": 3}
COMMANDS = ("save", "base", "load_shards", "load_full")


class Loader:
    """State of this process: the base its loads are counted from."""

    def __init__(self) -> None:
        self._base = 0

    def save(self, shape: str, dtype: str, folder: str) -> None:
        """Writes a model with random weights as ``save_pretrained`` does."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(WEIGHT_SEED)
        with default_dtype(getattr(torch, dtype)):
            AutoModelForCausalLM.from_config(shape_named(shape).configuration()).save_pretrained(folder)

    def base(self, folder: str) -> int:
        """Loads the small model in ``folder`` both ways, so that every library is there; bytes resident."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.load_shards(folder)
        self.load_full(folder)
        process_memory.return_free_pages()
        self._base = process_memory.resident_bytes()
        return self._base

    def load_shards(self, folder: str) -> dict[str, Any]:
        """Shards of stage 3 straight out of the files; then prepared, with the gather buffers."""
        began = self._begin()
        model = from_pretrained(_model_class(), folder, CONFIG)
        seconds = time.perf_counter() - began
        loaded = process_memory.peak_bytes() - self._base
        sizes = {id(each): each.numel() * each.element_size() for each in model.parameters()}
        experts = [
            sum(each.numel() * each.element_size() for each in module.parameters() if each.dim() > 2)
            for name, module in model.named_modules()
            if name.endswith(".experts")
        ]
        zero_ext.prepare(model, None, CONFIG)
        return {
            "seconds": seconds,
            "peak": loaded,
            "prepared": process_memory.peak_bytes() - self._base,
            "parameters": sum(sizes.values()),
            "largest": max(sizes.values()),
            "experts": max(experts, default=0),
        }

    def load_full(self, folder: str) -> dict[str, Any]:
        """The whole model, as transformers loads it."""
        began = self._begin()
        model = _model_class().from_pretrained(folder, dtype="auto")
        for each in model.parameters():
            each.data.max()  # what is only mapped so far counts when it is used
        return {"seconds": time.perf_counter() - began, "peak": process_memory.peak_bytes() - self._base}

    def _begin(self) -> float:
        process_memory.return_free_pages()
        process_memory.reset_peak()
        dist.barrier()
        return time.perf_counter()


def _model_class() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def folder_bytes(folder: Path) -> int:
    """Bytes of the weights in ``folder``."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main(Loader(), COMMANDS)
