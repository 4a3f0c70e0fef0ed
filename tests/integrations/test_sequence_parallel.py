"""Sparse attention of a model of one's own whose sequences lie over ranks, under ZeRO: as one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.attention import BlockLayout, SparseSelfAttention
from zero_ext.integrations import apply_sequence_parallel
from zero_ext.parallel import make_mesh, shard_batch

STEPS, SAMPLES, LENGTH, WIDTH, HEADS, WORDS = 3, 4, 64, 32, 4, 11


@functools.cache
def mesh_of(cp: int) -> DeviceMesh:
    """All ranks; made once in a process."""
    return make_mesh(cp=cp, device_type="cpu")


class Block(nn.Module):
    """Four heads of queries, two of keys and values; a token sees the 16-blocks next to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = SparseSelfAttention(
            {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 3}
        )

    def forward(self, hidden: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        projections = self.project(hidden).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
        found = self.attention(
            *projections.split([HEADS, HEADS // 2, HEADS // 2], 1), enable_gqa=True, key_padding=padding
        )
        return hidden + self.out(found.transpose(1, 2).flatten(2))


class Words(nn.Module):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.words(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return self.scores(hidden)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = model(*(batch[name] for name in ("input_ids", "position_ids", "attention_mask")))
    total = F.cross_entropy(scores.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    return total / batch["num_items_in_batch"]


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(("cp", "stage"), [(2, 0), (2, 3), (4, 0), (4, 3)])
def test_steps_are_those_of_one_process(world: World, cp: int, stage: int) -> None:
    mesh, model, reference = mesh_of(cp), Words(world.seed), Words(world.seed)
    apply_sequence_parallel(model, mesh)
    with pytest.raises(ValueError, match="its sequences are sharded already"):
        apply_sequence_parallel(model, mesh)
    optimizer, plain = (
        torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, reference)
    )
    config = {"stage": stage, "gradient_clipping": 0.5}
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=mesh)
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    one = DeviceMesh("cpu", torch.tensor([world.rank]), mesh_dim_names=("cp",))
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH))
        labels = torch.where(torch.rand(SAMPLES, LENGTH) < torch.linspace(1, 0.1, LENGTH), words, -100)
        seen = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (SAMPLES, 1))
        batches = [
            dict(zip(("input_ids", "labels", "attention_mask"), each, strict=True))
            for each in zip(*(tensor.chunk(replicas) for tensor in (words, labels, seen)), strict=True)
        ]
        loss = loss_of(model, shard_batch(batches[replica], mesh))
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        wanted = torch.stack([loss_of(reference, shard_batch(batch, one)) for batch in batches]).mean()
        wanted.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        mean = torch.tensor(world.everyone(float(loss.detach())), dtype=torch.float64).mean().item()
        torch.testing.assert_close(mean, float(wanted.detach()), rtol=1e-5, atol=0)
    for name, value in zero_ext.full_state_dict(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(4)
def test_a_layout_for_each_head_is_refused(world: World) -> None:
    layout = BlockLayout.from_block_mask(torch.ones(2, 4, 4, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match="expected one layout for all heads"):
        apply_sequence_parallel(nn.Sequential(SparseSelfAttention(layout)), mesh_of(2))
