"""The search against trying every layout, on cases where the answer is known, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from zero_ext.config.buffer_sizes import communicator_bytes
from zero_ext.plan.layout import LayoutRequest, ParallelLayout, best_layouts, fullest_rank, layouts, step_time
from zero_ext.plan.layout.layout_search import fewest_gpus, why_no_layout
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.plan_entry import CANDIDATES
from zero_ext.plan.simulation import Hardware, Training, Transformer, machine_named
from zero_ext.plan.simulation.training_setup import ACTIVATIONS

A100 = machine_named("dgx-a100")
COMMUNICATOR = communicator_bytes(4, 4, {})  # ranks in two axes have two
SMALL = ModelSpec.of_shape(
    Transformer("small", 512, 3, 4, 2000, 128, gated=True, tied=False, fused_attention=True), ""
)


def tried(wanted: LayoutRequest) -> dict[tuple[int, int, int], float]:
    """The fastest step of every length of pp, dp and tp that fits, by simulating all; tp inside nodes."""
    found: dict[tuple[int, int, int], float] = {}
    model, node = wanted.model, min(wanted.gpus, wanted.hardware.ranks_per_node)
    numbers = range(1, wanted.gpus + 1)
    for pp, dp, tp in product(numbers, numbers, numbers):
        if pp * dp * tp != wanted.gpus or pp > model.shape.layers or model.shape.heads % tp or node % tp:
            continue
        for micro_batch, steps in product(range(1, wanted.samples + 1), repeat=2):
            if micro_batch * steps * dp != wanted.samples or steps < pp:
                continue
            for candidate, activations in product(CANDIDATES, ACTIVATIONS):
                options = {**candidate.options, "activations": activations}
                training = Training(dp, micro_batch=micro_batch, accumulation_steps=steps, **options)
                layout = ParallelLayout(pp, tp, training)
                if not fullest_rank(model, layout, wanted.hardware).shortfalls:
                    seconds = step_time(model, layout, wanted.hardware).seconds
                    found[pp, dp, tp] = min(seconds, found.get((pp, dp, tp), seconds))
    return found


@pytest.mark.parametrize(
    ("gpus", "samples", "changes"),
    [
        (4, 4, {"device_bytes": 2 * COMMUNICATOR + 120 * 10**6}),
        (4, 8, {"device_bytes": 2 * COMMUNICATOR + 150 * 10**6, "inter_bandwidth": 1e9, "ranks_per_node": 2}),
        (6, 6, {"intra_bandwidth": 1e9, "inter_bandwidth": 1e8}),
    ],
)
def test_the_best_are_those_of_trying_all(gpus: int, samples: int, changes: dict[str, Any]) -> None:
    hardware = A100.replace(host_bytes=2 * 10**8, nvme_bytes=1, unit_seconds=1e-5, **changes)
    wanted = LayoutRequest(SMALL, hardware, gpus, samples)
    every = tried(wanted)
    fastest = sorted(every.values())
    assert len(fastest) > 3
    for count in (1, 3, 5):
        found = best_layouts(wanted, count)
        assert [one.time.seconds for one in found] == pytest.approx(fastest[:count], rel=1e-12)
        for one in found:
            lengths = one.layout.pp, one.layout.dp, one.layout.tp
            assert every[lengths] == pytest.approx(one.time.seconds, rel=1e-12)
            assert not fullest_rank(SMALL, one.layout, hardware).shortfalls


def test_what_fits_one_gpu_is_replicated() -> None:
    best = best_layouts(LayoutRequest(model_named("gpt-1.5b"), A100, 8, 64))[0].layout
    assert (best.pp, best.dp, best.tp) == (1, 8, 1)
    assert best.placement.distance == 0


def test_175_billion_on_1024_gpus() -> None:
    """Tensors stay inside a node, and what a rank holds is cut by stages or ZeRO-3; 300B tokens take about
    the five weeks that Narayanan et al. (arXiv 2104.04473, section 5.1) say of such a cluster."""
    found = best_layouts(LayoutRequest(model_named("gpt-175b").with_sequence(2048), A100, 1024, 1536))
    assert len(found) == 5
    assert [one.time.seconds for one in found] == sorted(one.time.seconds for one in found)
    for one in found:
        assert one.layout.gpus == 1024 and one.layout.tp <= 8
        assert one.layout.pp > 1 or one.layout.training.stage == 3
        assert one.fullest.needs.total("device") <= A100.device_bytes
    days = 300e9 / (1536 * 2048) * found[0].time.seconds / 86400
    assert 25 < days < 50


def test_a_trillion_on_3072_gpus_as_published() -> None:
    """502 petaFLOP/s in 8 x 64 x 6 (Narayanan et al., arXiv 2104.04473, table 1); the rates of the machine
    were fitted to a slower run."""
    model = ModelSpec.of_shape(Transformer("1008B", 25600, 128, 160, 51200, 2048), "")
    training = Training(6, stage=0, accumulation_steps=512)
    time = step_time(model, ParallelLayout(64, 8, training), A100)
    flops = 96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / 6 / 25600 + 51200 / 16 / 128 / 25600)
    assert 0.65 < flops / time.seconds / 502e15 < 1.0
    assert time.components["bubble"] / time.seconds == pytest.approx(63 / 575, rel=0.05)


def test_tensors_cross_nodes_only_where_nothing_else_fits() -> None:
    hardware = A100.replace(ranks_per_node=2)
    for samples, lengths in ((4, {1, 2}), (1, {4})):  # one sample: one replica, and no stages to keep busy
        found = best_layouts(LayoutRequest(SMALL, hardware, 4, samples))
        assert found and {one.layout.tp for one in found} <= lengths


def test_an_error_names_the_shortfall_and_the_remedy() -> None:
    wanted = LayoutRequest(model_named("gpt-175b"), A100.replace(nvme_bytes=1, host_bytes=1), 8, 8)
    assert best_layouts(wanted) == []
    text = why_no_layout(wanted)
    assert "GB too few" in text and "a device has 85.9 GB" in text
    gpus = fewest_gpus(wanted)
    assert gpus is not None and f"It would fit {gpus} GPUs" in text
    assert best_layouts(replace(wanted, gpus=gpus, samples=gpus), 1)
    assert not best_layouts(replace(wanted, gpus=gpus // 2, samples=gpus // 2), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, "gpus: expected an integer of at least 1, got 0"),
        ({"samples": 0}, "samples: expected .*, got 0"),
        ({"micro_batch": 0}, "micro_batch: expected .*, got 0"),
        ({"gpus": 5, "samples": 1, "micro_batch": 3}, "a multiple of 15 samples"),
    ],
)
def test_numbers_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        best_layouts(replace(LayoutRequest(SMALL, A100, 4, 4), **changes))


def test_layouts_and_machines_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"accumulation_steps: expected at least 4 micro-batches.*, got 2"):
        ParallelLayout(4, 1, Training(1, stage=0, accumulation_steps=2))
    with pytest.raises(ValueError, match=r"pp: expected at most 3 stages.* small, got 4"):
        fullest_rank(SMALL, ParallelLayout(4, 1, Training(1, stage=0, accumulation_steps=4)), A100)
    with pytest.raises(ValueError, match="intra_bandwidth"):
        Hardware.load({**A100.to_mapping(), "intra_bandwidth": 0})
    assert all(layout.gpus == 6 for layout in layouts(LayoutRequest(SMALL, A100, 6, 6)))
