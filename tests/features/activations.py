"""What a rank trains in each test of sparse attention and of what is kept for backward, on any device."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zero_ext
from tests.features.sharding import Found, ScaledModel, on_host
from tests.multi.rank import World
from tests.zero.models import language_batch, language_loss
from tests.zero.training import adamw, configuration
from zero_ext.attention import SparseSelfAttention
from zero_ext.parallel import make_mesh

WIDTH, HEADS, LENGTH, BLOCK = 32, 2, 64, 16


class Attending(nn.Module):
    """A residual layer of attention."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = attend

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(2, (HEADS, -1)).transpose(1, 2).contiguous()
            for each in self.project(hidden).chunk(3, 2)
        )
        mixed: torch.Tensor = self.attend(query, key, value)
        return hidden + mixed.transpose(1, 2).flatten(2)


def sparse(world: World, device: str, layout: dict[str, Any]) -> Found:
    """Steps of two sparse layers in stage 3."""
    torch.manual_seed(world.seed)
    layers = [Attending(SparseSelfAttention({"block": BLOCK, **layout})) for _ in range(2)]
    return attention_steps(world, device, layers)


def documents(world: World, device: str) -> Found:
    """Steps of two layers that attend within documents, in stage 3."""
    torch.manual_seed(world.seed)
    bounds = torch.tensor([0, 5, 40, LENGTH, 2 * LENGTH])
    layers = [Attending(functools.partial(zero_ext.document_attention, cu_seqlens=bounds)) for _ in range(2)]
    with sdpa_kernel(SDPBackend.MATH):  # the only one that every device has
        return attention_steps(world, device, layers)


def attention_steps(world: World, device: str, layers: list[Attending]) -> Found:
    """Steps of layers on [2, LENGTH, WIDTH] in stage 3."""
    model = nn.Sequential(*layers).to(device)
    config = configuration(3, gradient_clipping=0.5)
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config)
    generator = torch.Generator().manual_seed(world.seed + world.rank)
    losses = []
    for _ in range(2):
        hidden = torch.randn(2, LENGTH, WIDTH, generator=generator).to(device)
        loss = prepared(hidden).square().mean()
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}


class Checkpointed(ScaledModel):
    """Every block keeps its input alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = zero_ext.checkpoint_activations(block, hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def checkpointed(world: World, device: str, section: dict[str, Any]) -> Found:
    """Steps of a model whose blocks are computed again in backward, their inputs kept as ``section`` says."""
    torch.manual_seed(world.seed)
    model = Checkpointed().to(device)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"nvme_paths": [folder], "buffer_bytes": 1 << 20} if section.get("tier") == "nvme" else {}
        config = configuration(3, activation_checkpointing={**section, **paths}, gradient_clipping=0.5)
        mesh = make_mesh(tp=2, device_type=device) if section.get("partition_activations") else None
        prepared, optimizer = zero_ext.prepare(
            model,
            adamw(model.parameters()),
            config,
            process_group=mesh,
            activation_group=None if mesh is None else mesh["tp"].get_group(),
        )
        losses = []
        for step in range(2):
            loss = language_loss(
                prepared, language_batch(world.seed, step, 0, world.rank if mesh is None else 0).to(device)
            )
            prepared.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}
