"""The page on pipelines, split tensors and sequences over ranks: its code runs, in order, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_ext
from tests.integrations.transformers.models import VOCABULARY, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import make_mesh
from zero_ext.parallel.experts import MixtureOfExperts
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule, TiedLayerSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "parallel.md"


class Blocks(nn.Module):
    """What the page calls model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Module())
            self.blocks[-1].wide, self.blocks[-1].narrow = nn.Linear(8, 16), nn.Linear(16, 8)


def cross_entropy(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


@on_ranks(4)
def test_the_page_runs(world: World) -> None:
    # Those left out need a model of transformers.
    meshes, splits, _, sequences, own_loss, pipelines, _, layer_major, experts = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    torch.manual_seed(world.seed)
    words = torch.randint(256, (8, 3))
    names: dict[str, Any] = {
        "make_mesh": make_mesh,
        "parallelize_module": parallelize_module,
        "ColwiseParallel": ColwiseParallel,
        "RowwiseParallel": RowwiseParallel,
        "TiedLayerSpec": TiedLayerSpec,
        "LayerSpec": LayerSpec,
        "PipelineModule": PipelineModule,
        "Pipeline": Pipeline,
        "cross_entropy": cross_entropy,
        "zero_ext": zero_ext,
        "torch": torch,
        "nn": nn,
        "model": Blocks(),
        "inputs": words,
        "targets": words,
    }
    exec(meshes, names)
    assert dict(zip(names["mesh"].mesh_dim_names, names["mesh"].shape, strict=True))["dp"] == 1
    exec(splits, names)
    torch.manual_seed(world.seed)
    words = torch.randint(VOCABULARY, (2, 16))
    names |= {"model": llama(world.seed), "batch": {"input_ids": words, "labels": words}}
    exec(sequences, names)
    its_own = names["loss"].detach()
    exec(own_loss, names)
    torch.testing.assert_close(names["loss"].detach(), its_own)
    names["mesh"] = make_mesh(pp=2)
    exec(pipelines, names)
    assert torch.isfinite(names["loss"]) and names["held_out"] < names["loss"]
    exec(layer_major, names)
    assert torch.isfinite(names["loss"])
    hidden = torch.randn(2, 3, 512)
    names |= {"MixtureOfExperts": MixtureOfExperts, "make_expert": lambda number: nn.Linear(512, 512)}
    exec(experts, names | {"hidden": hidden, "loss": torch.tensor(0.0, device="cpu")})
