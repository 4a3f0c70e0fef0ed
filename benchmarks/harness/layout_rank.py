"""A rank that trains the model of examples/demo_3d in one layout after the other; driven by a team."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.worker import main
from examples.demo_3d.settings import ThreeDSettings
from examples.demo_3d.steps import ManyRanks, Step, batches, text_of
from zero_ext.parallel import make_mesh


class LayoutRank:
    """State of this process: torch.distributed's world."""

    def start(self) -> None:
        """Joins the others, or is a world of its own."""
        torch.set_num_threads(1)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def train(self, settings: dict[str, Any], text: str, axes: dict[str, int], stage: int) -> list[Step]:
        """Every step on the bytes of the file `text`."""
        chosen = ThreeDSettings(**settings)
        trained = ManyRanks(chosen, _mesh(**axes), {"stage": stage})
        steps = [trained.step(*batch) for batch in batches(chosen, text_of(Path(text)))]
        del trained
        gc.collect()  # ends its connections
        return steps


@functools.cache
def _mesh(**axes: int) -> DeviceMesh:
    return make_mesh(axes)


if __name__ == "__main__":
    main(LayoutRank(), ("start", "train"))
