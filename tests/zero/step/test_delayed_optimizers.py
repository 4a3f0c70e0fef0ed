"""Delayed updates by torch's own optimizers."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "NAdam", "Adam"])
def test_torchs_own_optimizers(world: World, name: str) -> None:
    """Where gradients do not depend on the parameters, the delay changes nothing in the end."""
    more = {"amsgrad": True} if name == "Adam" else {}
    results = []
    for tier in ("host", "nvme"):
        for step in ("after_backward", "delayed"):
            torch.manual_seed(world.seed)
            module = nn.Linear(24, 8)
            optimizer = getattr(torch.optim, name)(module.parameters(), lr=1e-2, **more)
            with tempfile.TemporaryDirectory() as folder:
                paths = {"nvme_paths": [folder]} if tier == "nvme" else {}
                offload = {"optimizer": tier, "update_mode": step, **paths}
                config = {"stage": 2, "offload": offload}
                model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=world.group)
                generator = torch.Generator().manual_seed(world.seed + world.rank)
                for _ in range(4):
                    model(torch.randn(3, 24, generator=generator)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(zero_ext.full_state_dict(model))
                del model, module, optimizer
    for found in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(value, found[key]), key
