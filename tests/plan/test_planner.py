"""Plans: what fits where, what is advised and why, what is said where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_ext.config import ZeroConfig
from zero_ext.plan.models import model_named
from zero_ext.plan.plan_entry import Batch, PlanEntry, config_of, largest_micro_batch
from zero_ext.plan.planner import Plan, fewest_gpus, make_plan, recommend, why_nothing_fits
from zero_ext.plan.simulation import MACHINES, Training, simulate
from zero_ext.plan.simulation.hardware import cluster_of
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.simulate import estimate_step


def planned(
    model: str, gpus: int, samples: int | None = None, micro: int | None = None, **options: object
) -> Plan:
    objective = options.pop("objective", "speed")
    hardware = cluster_of(**{"machine": "dgx2-v100", **options})  # type: ignore[arg-type]
    batch = Batch(samples or gpus, micro, gpus)
    return make_plan(model_named(model), hardware, gpus, batch, objective)  # type: ignore[arg-type]


def fitting(plan: Plan) -> list[PlanEntry]:
    return [row for row in plan.entries if row.fits]


def test_a_trillion_fits_a_dgx2_only_with_nvme() -> None:
    rows = fitting(planned("1t", 16))
    assert rows
    assert all(row.training.params == "nvme" and row.training.optimizer == "nvme" for row in rows)
    assert fitting(planned("1t", 16, nvme=0)) == []


def test_a_trillion_fits_512_gpus_without() -> None:
    assert any("nvme" not in row.candidate.options.values() for row in fitting(planned("1t", 512)))
    assert not any(row.fits for row in planned("1t", 512).entries if row.candidate.stage < 3)


def test_13_billion_fit_one_v100_only_with_offload() -> None:
    rows = fitting(planned("13b", 1))
    assert rows
    assert all(row.training.optimizer != "device" for row in rows)
    assert fitting(planned("1.4B", 1))[0].candidate.distance == 0  # a tenth of it does not need any


def test_100_trillion_fit_many_gpus() -> None:
    plan = planned("100t", 1536, machine="dgx-h200")
    assert plan.recommendation is not None
    assert plan.recommendation.entry.training.params == "nvme"


def test_advice_flips_from_stage_3_to_2_as_the_link_gets_slower() -> None:
    stages = []
    for rate in (200e9, 50e9, 10e9, 2e9, 0.5e9):
        plan = planned("1.5B", 8, 64, link_bandwidth=rate, machine="dgx-a100")
        assert plan.recommendation is not None
        stages.append(plan.recommendation.entry.candidate.stage)
        if stages[-1] == 2:
            assert any("longer on this link" in reason for reason in plan.recommendation.reasons)
    assert stages[0] == 3
    assert stages[-1] == 2
    assert stages == sorted(stages, reverse=True)


def test_objectives_differ_in_what_they_promise() -> None:
    speed, memory = (
        planned("llama-7b", 8, 64, machine="dgx-a100", objective=name) for name in ("speed", "memory")
    )
    assert speed.recommendation is not None
    assert memory.recommendation is not None
    fastest = max(row.tokens_per_second for row in fitting(speed))
    assert speed.recommendation.entry.tokens_per_second >= 0.95 * fastest
    assert memory.recommendation.entry.tokens_per_second >= 0.5 * fastest
    bearable = [row for row in fitting(memory) if row.tokens_per_second >= 0.5 * fastest]
    least = min(row.needs.total("device") for row in bearable)
    assert memory.recommendation.entry.needs.total("device") == least
    assert recommend([], "speed") is None


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    model, machine = model_named("llama-7b"), MACHINES["dgx-a100"]
    for row in planned("llama-7b", 8, 64, machine="dgx-a100").entries:
        if row.training.accumulation_steps == 1 or not row.largest_micro_batch:
            continue
        for samples, fits in ((row.largest_micro_batch, True), (row.largest_micro_batch + 1, False)):
            needs = memory_needs(model.full_cost, replace(row.training, micro_batch=samples), machine)
            assert (not needs.shortfalls(machine)) == fits
    assert largest_micro_batch(model.full_cost, Training(1, stage=0), machine) == 0


def test_batches_divide_and_every_entry_sees_the_same_samples() -> None:
    for row in planned("350M", 4, 48, machine="dgx-a100").entries:
        assert 4 * row.training.micro_batch * row.training.accumulation_steps == 48
    assert all(row.training.micro_batch == 3 for row in planned("350M", 4, 48, 3).entries)
    for samples, micro in ((7, None), (0, None), (48, 5), (4, 2)):
        with pytest.raises(ValueError, match="--batch: expected"):
            Batch(samples, micro, 4)


@pytest.mark.parametrize("model", ["llama-7b", "1t", "13b"])
@pytest.mark.parametrize(
    "options",
    [{"stage": 2}, {"stage": 3, "params": "nvme", "grads": "nvme", "optimizer": "nvme"}],
    ids=["stage2", "nvme"],
)
def test_deep_models_are_continued_as_if_every_layer_had_been_simulated(model: str, options: dict) -> None:
    found, machine = model_named(model), MACHINES["dgx2-v100"]
    training = Training(16, **options)
    timeline = simulate(found.cost(), training, machine)
    quick = estimate_step(found.full_cost, training, machine)
    assert quick.seconds == pytest.approx(timeline.seconds, rel=0.02)
    assert quick.read == pytest.approx(
        timeline.busy.get("NVMe read", 0.0) * machine.for_rank(16).nvme_read, rel=0.02
    )


def test_bytes_moved_are_those_of_the_state() -> None:
    """Gradients out, parameters in (2 bytes each); on NVMe master weights and moments both ways."""
    rows = {str(row.candidate): row for row in planned("13b", 16, machine="dgx-a100").entries}
    owned = model_named("13b").parameters / 16
    host = rows["stage 2, host"].step
    assert (host.to_host, host.to_device) == pytest.approx((2 * owned, 2 * owned), rel=0.01)
    stored = rows["stage 2, nvme"].step
    assert (stored.read, stored.written) == pytest.approx((12 * owned, 12 * owned), rel=0.01)
    # Parameters in forward and backward, gradients for the norm and for the update.
    everything = rows["stage 3, nvme"].step
    assert everything.read == pytest.approx((12 + 2 * 2 + 2 * 2) * owned, rel=0.02)
    assert everything.written == pytest.approx((12 + 2 + 2) * owned, rel=0.02)
    assert rows["stage 2, device"].step.to_host == 0


def test_half_duplex_reads_and_writes_are_counted_separately() -> None:
    hardware = MACHINES["dgx2-v100"].replace(nvme_half_duplex=True)
    training = Training(16, stage=2, grads="host", optimizer="nvme")
    both = estimate_step(model_named("13b").full_cost, training, hardware)
    apart = estimate_step(model_named("13b").full_cost, training, MACHINES["dgx2-v100"])
    assert (both.read, both.written) == (apart.read, apart.written)
    assert both.seconds > apart.seconds


def test_where_nothing_fits_what_is_missing_is_said_and_what_would_fit() -> None:
    plan = planned("175b", 16, nvme=0)
    assert plan.recommendation is None
    text = why_nothing_fits(plan)
    assert "GB too few" in text
    gpus = fewest_gpus(plan)
    assert gpus is not None
    assert f"{gpus} GPUs" in text
    assert gpus > 16
    assert fitting(planned("175b", gpus, nvme=0))
    size = text.split("about ")[1].split(" ")[0]
    model = model_named(size).with_sequence(plan.model.shape.sequence)
    assert fitting(make_plan(model, plan.hardware, 16, plan.batch)), size
    assert "not fit 65536" in why_nothing_fits(planned("100t", 16, nvme=0, host_memory=0))


@pytest.mark.parametrize("model", ["350M", "13b", "1t"])
def test_every_row_is_a_configuration_that_says_the_same(model: str) -> None:
    plan = planned(model, 16, 64)
    for row in plan.entries:
        config = config_of(plan.model, row.training, ("/mnt/a", "/mnt/b"))
        again = ZeroConfig.from_mapping(config.model_dump(mode="json", exclude_unset=True))
        assert again == config
        said = Training.of_config(again, 16, row.training.activations)
        assert said == row.training
        assert bool(config.units.tiles) == (row.training.stage == 3 and plan.model.shape.tiles > 1)


def test_cluster_options_override_the_machine() -> None:
    plan = planned("13b", 16, gpu_memory=80 * 10**9, host_memory=10**12, nvme=0, gpus_per_host=4)
    assert plan.hosts == 4
    assert plan.hardware.device_bytes == 80 * 10**9
    assert all(not row.fits for row in plan.entries if "nvme" in row.candidate.options.values())
    assert plan.entries[5].needs.ranks == 4
    with pytest.raises(ValueError, match=r"machine: expected .*, got 'cray'"):
        planned("13b", 16, machine="cray")


def test_total_time_is_steps_times_step_time() -> None:
    plan = replace(planned("1.5B", 8, 64), tokens=10**9)
    row = plan.entries[0]
    assert row.tokens == 64 * 2048 or row.sequence == 1024
    steps = -(-(10**9) // (64 * row.sequence))
    assert plan.total_seconds(row) == pytest.approx(steps * row.step.seconds)
    assert planned("1.5B", 8).total_seconds(row) is None


def test_large_blocks_are_gathered_ahead_where_memory_allows() -> None:
    recommendation = planned("175b", 1024, machine="dgx-a100").recommendation
    assert recommendation is not None
    training = recommendation.entry.training
    block = max(unit.parameters for unit in model_named("175b").full_cost.units)
    assert training.max_live_elements >= 2 * block > 1_000_000_000
    cost, machine = model_named("175b").full_cost, MACHINES["dgx-a100"]
    slow = simulate(cost, replace(training, max_live_elements=1_000_000_000), machine)
    assert simulate(cost, training, machine).seconds < slow.seconds
    written = config_of(model_named("175b"), training).units
    assert written.max_live_elements == training.max_live_elements
    small = planned("1.4B", 16, machine="dgx-a100")
    assert {row.training.max_live_elements for row in small.entries} == {ZeroConfig().units.max_live_elements}
