"""The page on DeepSpeed's names: its pipeline runs on four ranks."""

from __future__ import annotations

import re
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deepspeed_api.md"


def cross_entropy(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


@on_ranks(4)
def test_the_page_runs(world: World) -> None:
    (code,) = re.findall(r"## Pipelines\n\n```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    generator = torch.Generator().manual_seed(world.seed)
    batch = tuple(torch.randint(256, (2, 2, 3), generator=generator))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    names: dict[str, Any] = {"nn": nn, "cross_entropy": cross_entropy, "config": config}
    names |= {"data_iter": repeat(batch), "held_out_iter": repeat(batch)}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["engine"].global_steps == 1 and names["held_out"] < names["loss"]
