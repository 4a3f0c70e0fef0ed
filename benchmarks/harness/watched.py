"""A rank that trains with monitors on and off, a step each, in turn.

Driven by a team like :mod:`benchmarks.harness.worker`.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.shapes import batch_for, shape_named
from benchmarks.harness.worker import main
from benchmarks.peers.zero_ext_engine import ZeroExtTrainer
from zero_ext.config import MonitorConfig
from zero_ext.config.events import Event
from zero_ext.monitor import attach, monitor_of
from zero_ext.zero import engine_of

COMMANDS = ("start", "steps")


class Timed:
    """Adds up the processor time that a subscriber takes of the training thread, and counts events."""

    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber
        self.seconds = 0.0
        self.events = 0

    def __call__(self, event: Event) -> None:
        began = time.thread_time()
        self._subscriber(event)
        self.seconds += time.thread_time() - began
        self.events += 1


class Watched:
    """State of this process: its trainer and how many steps it has made."""

    def __init__(self) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._steps = 0

    def start(self, shape: str, threads: int, options: dict[str, Any], warm_up: int) -> None:
        """Joins the others, builds the trainer and makes ``warm_up`` steps."""
        torch.set_num_threads(threads)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
        self._shape = shape_named(shape)
        self._trainer = ZeroExtTrainer(self._shape, **options)
        for _ in range(warm_up):
            self._step()

    def steps(self, policy: dict[str, Any], folder: str, pairs: int, seed: int) -> dict[str, Any]:
        """Pairs of steps, one with the monitors of ``policy`` and one without, in random order: the seconds
        of each, what the monitors themselves took a step, and the events they heard."""
        engine = engine_of(self._trainer.model)
        written = MonitorConfig.from_mapping({**policy, "output_dir": str(Path(folder) / "run")})
        monitor = attach(self._trainer.model, written)
        if monitor is None:
            raise RuntimeError(f"{policy} watches nothing on rank {self._rank}")
        engine.unsubscribe(monitor)
        timed = Timed(monitor)
        chance = random.Random(seed)
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        gc.collect()
        gc.disable()
        for _ in range(pairs):
            for which in chance.sample(["on", "off"], 2):
                if which == "on":
                    engine.subscribe(timed)
                seconds[which].append(self._step())
                engine.unsubscribe(timed)
        gc.enable()
        monitor.close()
        if monitor_of(self._trainer.model) is not None:
            raise RuntimeError("a monitor is still there after it was closed")
        return {**seconds, "own": timed.seconds / pairs, "events": timed.events / pairs}

    def _step(self) -> float:
        tokens = batch_for(self._shape, self._rank, self._steps)
        self._steps += 1
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self._trainer.step(tokens)
        return time.perf_counter() - began

    def close(self) -> None:
        """The model goes."""
        self._trainer.close()


if __name__ == "__main__":
    main(Watched(), COMMANDS)
