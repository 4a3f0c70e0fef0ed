"""A process that generates tokens: a Llama with random weights, in memory or with its parameters on NVMe.

Driven by a team like :mod:`benchmarks.harness.worker`.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from typing import Any

import torch

import zero_ext
from benchmarks.harness import process_memory
from benchmarks.harness.shapes import WEIGHT_SEED, LlamaShape, default_dtype
from benchmarks.harness.worker import main
from zero_ext.zero import Engine, engine_of

PROMPT = 4
READS_IN_FLIGHT = 3  # units
COMMANDS = ("start", "generate", "forwards", "read_pass", "peak_bytes")


class Generator:
    """State of this process: its model, and where the decoding stands."""

    def __init__(self) -> None:
        self._model: Any = None
        self._cache: Any = None
        self._token = torch.empty(0)

    def start(self, shape: dict[str, Any], threads: int, nvme: str | None) -> dict[str, Any]:
        """Builds the model in bfloat16, born on NVMe if a folder is given; seconds, and bytes of
        parameters."""
        torch.set_num_threads(threads)
        began = time.perf_counter()
        config = LlamaShape(**shape).configuration()
        config.use_cache = True
        if nvme is None:
            self._model = _build(config)
        else:
            settings = {"stage": 3, "offload": {"params": "nvme", "nvme_paths": [nvme]}}
            with zero_ext.Init(settings):
                model = _build(config)
            self._model, _ = zero_ext.prepare(model, config=settings)
        self._model.eval()
        return {"seconds": time.perf_counter() - began, "bytes": 2 * LlamaShape(**shape).parameters}

    def generate(self, count: int) -> list[int]:
        """Token ids that `generate` adds to a prompt, greedily."""
        ids = self._model.generate(_prompt(), max_new_tokens=count, do_sample=False, eos_token_id=None)
        return ids[0, PROMPT:].tolist()

    @torch.inference_mode()
    def forwards(self, count: int) -> dict[str, Any]:
        """Decodes one token at a time with a KV cache, after a prompt the first time and one more forward;
        seconds of each forward, and a digest of its logits."""
        if self._cache is None:
            self._next_token(self._model(_prompt(), use_cache=True))
        self._decode()
        seconds, digests = [], []
        for _ in range(count):
            began = time.perf_counter()
            logits = self._decode()
            seconds.append(time.perf_counter() - began)
            digests.append(hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())
        return {"seconds": seconds, "digests": digests}

    def _decode(self) -> torch.Tensor:
        return self._next_token(self._model(self._token, past_key_values=self._cache, use_cache=True))

    def _next_token(self, output: Any) -> torch.Tensor:
        self._cache = output.past_key_values
        self._token = output.logits[:, -1:].argmax(-1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def read_pass(self) -> dict[str, float]:
        """Reads every unit's extent once, in order, as a forward does, with nothing to compute; bytes and
        seconds."""
        engine: Engine = engine_of(self._model)
        engine.prefetcher.release_idle()
        in_flight: deque[Any] = deque()

        def finish() -> None:
            handle, buffer = in_flight.popleft()
            handle.wait()
            engine.pool.release(buffer)

        began, nbytes = time.perf_counter(), 0
        for unit in engine.units:
            if len(in_flight) == READS_IN_FLIGHT:
                finish()
            buffer = engine.pool.acquire(unit.layout.nbytes)
            in_flight.append((unit.storage.fetch(buffer.view(unit.layout.dtype)), buffer))
            nbytes += buffer.nbytes
        while in_flight:
            finish()
        return {"bytes": nbytes, "seconds": time.perf_counter() - began}

    def peak_bytes(self) -> int:
        """Most memory that was resident, libraries included."""
        return process_memory.peak_bytes()


def _build(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(WEIGHT_SEED)
    with default_dtype(torch.bfloat16):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _prompt() -> torch.Tensor:
    return torch.arange(1, PROMPT + 1).unsqueeze(0)


if __name__ == "__main__":
    main(Generator(), COMMANDS)
