"""What a rank trains in each test of pipelines, split tensors, sequences and experts, on any device."""

from __future__ import annotations

import unittest.mock
from typing import Any

import torch
from torch import nn

import zero_ext
from tests.features.sharding import Found, on_host
from tests.multi.rank import World
from tests.parallel.experts import mixtures
from tests.parallel.pipeline import toy_stages as stages
from tests.parallel.sequence.test_ulysses import LENGTH, WIDTH, Attending
from tests.parallel.tensor.test_tensor_parallel import Words, split
from tests.parallel.training import SAMPLES, adamw, batches, loss_of
from tests.zero.test_accelerator import Scale
from zero_ext.attention.tile_attention import KERNELS
from zero_ext.parallel import make_mesh, ring_attention, sequence_attention, shard_batch
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule
from zero_ext.zero import engine_of

RING_LENGTH, RING_WIDTH = 64, 32


def pipeline(
    world: World, device: str, lengths: dict[str, int], config: dict[str, Any], **settings: Any
) -> Found:
    """A pipeline with a tied embedding, its blocks split where the mesh has "tp"."""
    torch.manual_seed(world.seed)
    mesh = make_mesh(lengths, device_type=device)
    specifications = stages.specifications()
    specifications[stages.BLOCKS + 1] = LayerSpec(Scale, stages.WIDTH)
    module = PipelineModule(specifications, mesh, loss=stages.mean_loss, **settings)
    if mesh["tp"].size() > 1:
        stages.split_blocks(module, mesh, stages.Block)
    optimizer = adamw(module)
    model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh, device=device)
    engine = Pipeline(model, optimizer, micro_batches=4)
    own = mesh["dp"].get_local_rank()
    losses, norms = [], []
    for words, wanted in batches(world.seed, 3, SAMPLES * mesh["dp"].size()):
        share_index = slice(SAMPLES * own, SAMPLES * (own + 1))
        losses.append(
            float(engine.train_batch(words[share_index].to(device), targets=wanted[share_index].to(device)))
        )
        norms.append(engine_of(model).grad_norm)
    evaluated = float(
        engine.eval_batch(words[share_index].to(device), targets=wanted[share_index].to(device))
    )
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        **on_host(zero_ext.full_state_dict(model)),
    }


def tensors(world: World, device: str, config: dict[str, Any], sequence: bool) -> Found:
    """Embedding, blocks and scores split over two ranks, beside ZeRO."""
    torch.manual_seed(world.seed)
    mesh = make_mesh(tp=2, device_type=device)
    words = Words().to(device)
    for block in words.blocks:
        block.norm = block.norm if sequence else Scale(block.norm.weight.numel()).to(device)
    model = split(words, mesh, sequence)
    optimizer = adamw(model)
    prepared, optimizer = zero_ext.prepare(model, optimizer, config, process_group=mesh)
    losses, norms = [], []
    share, own = SAMPLES // mesh["dp"].size(), mesh["dp"].get_local_rank()
    for inputs, wanted in batches(world.seed, 3):
        share_index = slice(share * own, share * (own + 1))
        loss = loss_of(prepared, inputs[share_index].to(device), wanted[share_index].to(device))
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(engine_of(prepared).grad_norm)
    return {"losses": losses, "norms": norms, **on_host(zero_ext.full_state_dict(prepared))}


def experts(world: World, device: str, config: dict[str, Any]) -> Found:
    """Mixtures whose experts are spread over two ranks."""
    torch.manual_seed(world.seed)
    mesh = make_mesh(ep=2, device_type=device)
    model = mixtures.Words(mesh)
    for block in model.blocks:
        block.norm = Scale(mixtures.WIDTH)
    model.to(device)
    prepared, optimizer = zero_ext.prepare(model, adamw(model), config, process_group=mesh)
    engine = engine_of(prepared)
    share = SAMPLES // engine.world_size
    own = slice(share * engine.rank, share * (engine.rank + 1))
    losses, norms = [], []
    for words, wanted in batches(world.seed, 3):
        loss, _ = mixtures.loss_of(prepared, words[own].to(device), wanted[own].to(device), False)
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(engine.grad_norm)
    return {"losses": losses, "norms": norms, **on_host(zero_ext.full_state_dict(prepared))}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Causal attention by operators that every device computes in the same order."""
    assert is_causal
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value


def sequences(world: World, device: str, config: dict[str, Any], lengths: dict[str, int]) -> Found:
    """Attention of sequences that lie on two ranks, in a pipeline of one stage or two."""
    torch.manual_seed(world.seed)
    mesh = make_mesh(lengths, device_type=device)
    attention = sequence_attention(attend, mesh, timeout_seconds=120.0)
    layers = [LayerSpec(Attending, attention) for _ in range(4)]
    module = PipelineModule(layers, mesh, loss=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh, device=device)
    engine = Pipeline(model, optimizer, micro_batches=2)
    losses = []
    for _ in range(3):
        hidden, wanted = torch.randn(2, 4, LENGTH, WIDTH).chunk(2)
        share_index = mesh["cp"].get_local_rank()
        inputs, targets = (
            each[0].chunk(2, 1)[share_index].contiguous().to(device) for each in (hidden, wanted)
        )
        losses.append(float(engine.train_batch(inputs, targets=targets)))
    return {"losses": losses, **on_host(zero_ext.full_state_dict(model))}


class Rings(nn.Module):
    """Two residual layers of ring attention, with heads of 16."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(RING_WIDTH, 3 * RING_WIDTH) for _ in range(2))
        self.attention = attention

    def forward(self, hidden: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        for project in self.projections:
            query, key, value = (
                each.unflatten(2, (-1, 16)).transpose(1, 2) for each in project(hidden).chunk(3, 2)
            )
            attended: torch.Tensor = self.attention(query, key, value, documents)
            hidden = hidden + attended.transpose(1, 2).flatten(2)
        return hidden


def rings(world: World, device: str, config: dict[str, Any], cp: int, ring: int) -> Found:
    """Ring attention to packed documents. All devices use the kernel of those that have no other."""
    torch.manual_seed(world.seed)
    mesh = make_mesh(cp=cp, device_type=device)
    module = Rings(ring_attention(mesh, ring=ring, timeout_seconds=120.0)).to(device)
    model, optimizer = zero_ext.prepare(module, adamw(module), config, process_group=mesh)
    generator = torch.Generator().manual_seed(world.seed + mesh["dp"].get_local_rank())
    losses, norms = [], []
    for _ in range(2):
        hidden = torch.randn(2, RING_LENGTH, RING_WIDTH, generator=generator)
        bounds = torch.tensor([0, 7, 40, RING_LENGTH, 2 * RING_LENGTH])
        batch = {"inputs_embeds": hidden, "cu_seq_lens_q": bounds}
        shard = shard_batch(batch, mesh, ring=ring, packed=True)
        with unittest.mock.patch.dict(KERNELS, clear=True):
            loss = model(shard["inputs_embeds"].to(device), shard["cu_seq_lens_q"]).square().mean()
            model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(engine_of(model).grad_norm)
    return {"losses": losses, "norms": norms, **on_host(zero_ext.full_state_dict(model))}
