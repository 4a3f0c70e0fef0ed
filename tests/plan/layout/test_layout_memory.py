"""Planned bytes of a rank against what a real run on four ranks holds, and ZeRO x tp x pp multiplied."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.plan.layout.llama import llama
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import Pipeline
from zero_ext.plan.layout import ParallelLayout, rank_needs
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.simulation import Training, Transformer, machine_named
from zero_ext.zero import engine_of

STATE = ("params", "grads", "optimizer")
TINY = Transformer("tiny", 128, 4, 4, 600, 16, 352, gated=True, tied=False, fused_attention=True)
MACHINE = machine_named("dgx-a100")
SAMPLES = 4


@functools.cache
def mesh_of(pp: int, tp: int) -> DeviceMesh:
    """All ranks; made once in a process."""
    return make_mesh(pp=pp, tp=tp, device_type="cpu")


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("pp", "tp", "stage", "offload"),
    [(2, 2, 0, {}), (2, 1, 1, {"optimizer": "host"}), (1, 2, 2, {}), (2, 1, 3, {})],
)
def test_a_real_run_holds_what_was_planned(
    world: World, pp: int, tp: int, stage: int, offload: dict[str, str]
) -> None:
    dp = 4 // pp // tp
    training = Training(
        dp, stage=stage, micro_batch=1, accumulation_steps=SAMPLES // dp, bucket_elements=60_000, **offload
    )
    layout = ParallelLayout(pp, tp, training)
    mesh = mesh_of(pp, tp)
    module = llama(TINY, mesh)
    config = {
        "stage": stage,
        "precision": {"dtype": "bf16"},
        "batch": {"gradient_accumulation_steps": layout.micro_batches},
        "units": {"bucket_elements": training.bucket_elements},
        "offload": offload,
    }
    model, optimizer = zero_ext.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=1e-3), config, process_group=mesh
    )
    grad_reduction = "per_micro_batch" if stage >= 2 else "per_step"
    pipeline = Pipeline(model, optimizer, micro_batches=layout.micro_batches, grad_reduction=grad_reduction)
    words = torch.randint(TINY.vocabulary, (2, layout.micro_batches, TINY.sequence))
    pipeline.train_batch(words[0], targets=words[1])
    held = engine_of(model).memory_by_tier()
    planned = rank_needs(ModelSpec.of_shape(TINY, ""), layout, MACHINE, mesh["pp"].get_local_rank()).needs
    for tier in ("device", "host"):
        wanted = getattr(planned, tier)
        for kind in STATE:
            assert wanted.get(kind, 0) == pytest.approx(held[tier][kind], rel=0.03), (tier, kind)


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (4, 1, 1), (1, 1, 8), (1, 64, 1), (8, 16, 8)])
def test_zero_tp_and_stages_multiply(pp: int, dp: int, tp: int) -> None:
    """16 bytes an element over all ranks in ZeRO-3, whatever shares them; 4 + 12/dp in ZeRO-1."""
    model = model_named("llama-65b")
    for stage, of_element in ((3, 16 / dp), (1, 4 + 12 / dp)):
        layout = ParallelLayout(pp, tp, Training(dp, stage=stage, accumulation_steps=pp, micro_batch=1))
        several = 2 if pp > 1 else 0  # sums of gradients in fp32
        of_element += several if stage == 1 else several / dp
        ranks = [rank_needs(model, layout, MACHINE, number).needs.device for number in range(pp)]
        mean = sum(needs[kind] for needs in ranks for kind in STATE) / pp
        assert mean == pytest.approx(of_element * model.parameters / pp / tp, rel=0.002)


def test_activations_are_those_of_the_micro_batches_in_flight() -> None:
    """A stage has one more waiting than the stage behind it, but never more than there are."""
    model = model_named("gpt-13b")
    for micro_batches, in_flight in ((4, [4, 3, 2, 1]), (16, [4, 3, 2, 1])):
        layout = ParallelLayout(
            4, 1, Training(1, stage=0, accumulation_steps=micro_batches, activations="saved")
        )
        one = ParallelLayout(1, 1, Training(1, stage=0, activations="saved"))
        single = rank_needs(model, one, MACHINE, 0).needs.device["activations"]
        activations = [
            rank_needs(model, layout, MACHINE, stage).needs.device["activations"] for stage in range(4)
        ]
        logits = 6 * model.shape.vocabulary * model.shape.sequence
        layers = [10, 10, 10, 10]
        wanted = [
            count * (single - logits) * held // 40 + (logits if position == 3 else 0)
            for position, (count, held) in enumerate(zip(in_flight, layers, strict=True))
        ]
        assert activations == pytest.approx(wanted, rel=1e-6)
