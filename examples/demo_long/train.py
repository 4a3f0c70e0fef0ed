"""One run of the demonstration, in a separate process.

Command: `python -m demo_long.train FOLDER RUN`. RUN is "base" (a tiny model, to measure the memory of the
interpreter and its libraries), "dense" (attention with the full attention matrix), "flash" (dense attention
with torch's fused kernel) or "sparse". The exit status is OUT_OF_MEMORY if an allocation failed.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from demo.corpus import ByteWindows, Corpus
from demo.folder import read_settings
from demo.language_model import build_model
from demo.record import write_record
from transformers import LlamaForCausalLM

from demo_long.settings import LongSettings

OUT_OF_MEMORY = 3
REFUSALS = re.compile("DefaultCPUAllocator|allocate memory")  # messages of torch and of the operating system
TINY = {"hidden_size": 32, "layers": 1, "feed_forward_size": 64, "heads": 2, "window": 64, "steps": 1}
IMPLEMENTATIONS = {"base": "sdpa", "dense": "eager", "flash": "sdpa", "sparse": "sdpa"}


def train(settings: LongSettings, run: str, folder: Path) -> dict[str, Any]:
    """Train on one window per step and return losses, times and memory."""
    corpus = Corpus.read(folder)
    windows = ByteWindows(corpus.training, settings.window).spread(settings.steps)
    held_out = ByteWindows(corpus.held_out, settings.window).spread(settings.held_out_windows)
    model = build_model(settings)
    model.set_attn_implementation(IMPLEMENTATIONS[run])
    if run == "sparse":
        from zero_ext.integrations.transformers import sparsify_attention

        sparsify_attention(model, settings.layout)
    judged = run == "sparse"
    if run == "dense":
        weights = 4 * settings.heads * settings.window**2
        print(f"the attention matrix of one layer takes {weights / 1e6:,.0f} MB", flush=True)
    before = held_out_loss(model, held_out) if judged else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    losses, seconds = [], []
    for step, window in enumerate(windows.unsqueeze(1), 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / 4)
        loss = model(input_ids=window, labels=window, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        print(f"step {step}: loss {losses[-1]:.3f}, {seconds[-1]:.1f} s", flush=True)
    after = held_out_loss(model, held_out) if judged else None
    return {
        "losses": losses,
        "seconds": seconds,
        "held_out": [before, after],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": _status_bytes("VmHWM"),
        "data_bytes": _status_bytes("VmData"),
    }


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Return the mean loss in nats per byte, computed one window at a time."""
    losses = [float(model(input_ids=w, labels=w, use_cache=False).loss) for w in windows.unsqueeze(1)]
    return sum(losses) / len(losses)


def _status_bytes(field: str) -> int:
    """Return a memory field of this process in bytes.

    Args:
        field: "VmHWM" (peak resident memory) or "VmData" (private writable memory that is mapped now).
    """
    # getrusage would report at least the peak of the parent, which survives fork and exec.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: expected {field}, got none. Run the demonstration on Linux.")


def main(folder: Path, run: str) -> int:
    """Run training, write the record and return the exit status."""
    settings = read_settings(LongSettings, folder)
    if run == "base":
        settings = dataclasses.replace(settings, **TINY)
    if run == "flash":
        settings = dataclasses.replace(settings, steps=settings.dense_steps)
    try:
        record = train(settings, run, folder)
    except (MemoryError, RuntimeError) as error:
        refused = isinstance(error, MemoryError) or REFUSALS.search(str(error))
        print(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
        if refused:
            return OUT_OF_MEMORY
        raise
    write_record(folder, run, 0, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
