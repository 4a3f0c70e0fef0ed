"""One training step at one length, a process of its own.

`python -m benchmarks.harness.long_trial KIND TOKENS DTYPE` prints JSON with the loss, the seconds
and the peak memory of the process; it ends with OUT_OF_MEMORY where memory was refused.
"""

from __future__ import annotations

import json
import re
import sys
import time

import torch

from benchmarks.harness import process_memory
from benchmarks.harness.long_model import VOCABULARY, Encoder, attention_of

OUT_OF_MEMORY = 3
REFUSALS = re.compile("DefaultCPUAllocator|allocate memory")  # what torch and the system say


def step(kind: str, tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Forward, backward and AdamW on one sequence of `tokens`."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = Encoder(kind, tokens)
    torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    ids = torch.randint(VOCABULARY, (1, tokens))
    began = time.perf_counter()
    with attention_of(kind):
        loss = model(ids)
        loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - began
    peak = process_memory.peak_bytes()  # getrusage tells no less than the parent had
    return {"loss": float(loss.detach()), "seconds": seconds, "peak_bytes": peak}


def main(kind: str, tokens: str, dtype: str) -> int:
    """Runs it; returns the exit status."""
    try:
        print(json.dumps(step(kind, int(tokens), getattr(torch, dtype))))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or REFUSALS.search(str(error)):
            print(str(error).splitlines()[0], file=sys.stderr)
            return OUT_OF_MEMORY
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
