"""Properties of simulated steps: monotone in every rate, right in what they count, quick for 1,024 ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.opcodes import count_opcodes
from zero_ext.config import CommunicationConfig, ZeroConfig
from zero_ext.config.tiers import TIERS, Tier
from zero_ext.plan import collective_elements, step_bytes
from zero_ext.plan.simulation import (
    MACHINES,
    TRANSFORMERS,
    Hardware,
    Training,
    Transformer,
    calibrated,
    fastest_placements,
    machine_named,
    model_cost,
    nearest_to_fit,
    simulate,
    transformer_named,
)
from zero_ext.plan.simulation.planned_units import lengths_gathered_once, unit_elements
from zero_ext.plan.simulation.simulate import sent_in_step
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, FIRST_STAGE, UPDATE_MODES
from zero_ext.plan.simulation.transformer_cost import ModelCost

SMALL = Transformer("small", hidden=256, layers=6, heads=4, vocabulary=1000, sequence=64, tiles=2)
RATES = (
    "matmul_flops",
    "device_bandwidth",
    "host_bandwidth",
    "to_host",
    "to_device",
    "node_to_host",
    "node_to_device",
    "nvme_read",
    "nvme_write",
    "intra_bandwidth",
    "inter_bandwidth",
)


def every_training(world_size: int) -> list[Training]:
    """All that can be asked for on ``world_size`` ranks."""
    found = []
    for stage, mode, activations, accumulation in product(range(4), UPDATE_MODES, ACTIVATIONS, (1, 3)):
        for params, grads, optimizer in product(TIERS, TIERS, TIERS):
            tiers = {"params": params, "grads": grads, "optimizer": optimizer}
            if any(tier != "device" and stage < FIRST_STAGE[kind] for kind, tier in tiers.items()):
                continue
            if mode == "delayed" and optimizer == "device":
                continue
            found.append(
                Training(
                    world_size,
                    stage,
                    accumulation_steps=accumulation,
                    update_mode=mode,  # type: ignore[arg-type]
                    activations=activations,  # type: ignore[arg-type]
                    prefetch_elements=500_000,
                    **tiers,  # type: ignore[arg-type]
                )
            )
    return found


TRAININGS = {world_size: every_training(world_size) for world_size in (1, 48)}


@settings(max_examples=80, deadline=None)
@given(
    training=st.sampled_from([training for found in TRAININGS.values() for training in found]),
    rate=st.sampled_from(RATES),
    factor=st.floats(1.0, 1000.0),
    host=st.booleans(),
    turns=st.booleans(),
)
def test_a_faster_machine_is_never_slower(
    training: Training, rate: str, factor: float, host: bool, turns: bool
) -> None:
    # Slow enough links that every one of them bounds some of these runs.
    slow = MACHINES["dgx2-v100"].replace(
        device_is_host=host,
        nvme_half_duplex=turns,
        matmul_flops=1e12,
        intra_bandwidth=1e9,
        inter_bandwidth=5e8,
    )
    model = SMALL.cost()
    before = simulate(model, training, slow)
    after = simulate(model, training, slow.replace(**{rate: getattr(slow, rate) * factor}))
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert 0.0 <= before.hidden <= 1.0
    longest = max(before.busy.values())
    assert longest <= before.seconds * (1 + 1e-9) <= sum(before.busy.values()) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("world_size", [1, 48])
def test_what_moves_is_what_the_placement_says(world_size: int) -> None:
    model = SMALL.cost()
    machine = MACHINES["dgx2-v100"].replace(collective_seconds=0.0, per_node_seconds=0.0)
    rates = machine.for_rank(world_size)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    ends = model.units[0], model.units[-1]  # the tied table and what forward ends with are gathered once
    for training in random.Random(seed).sample(TRAININGS[world_size], 60):
        busy = simulate(model, training, machine).busy
        shard = sum(-(-unit.parameters // world_size) for unit in model.units)
        micro = training.accumulation_steps
        once = sum(-(-unit.parameters // world_size) for unit in ends)
        read = 2 * (2 * shard - once) * micro if training.params == "nvme" else 0
        wrote = 2 * shard if training.params == "nvme" else 0
        if training.optimizer == "nvme":
            read, wrote = read + 12 * shard, wrote + 12 * shard
        if training.grads == "nvme":
            width = 4 if micro > 1 else 2
            read, wrote = read + micro * width * shard, wrote + micro * width * shard
            read += width * shard if training.clipping else 0
        assert busy.get("NVMe read", 0.0) * rates.nvme_read == pytest.approx(read), training
        assert busy.get("NVMe write", 0.0) * rates.nvme_write == pytest.approx(wrote), training


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_simulated_traffic_equals_the_formula(stage: int, accumulation: int) -> None:
    model = SMALL.cost()
    machine = MACHINES["dgx2-v100"].replace(collective_seconds=0.0, per_node_seconds=0.0)
    training = Training(16, stage, accumulation_steps=accumulation, clipping=False)
    carried = simulate(model, training, machine).busy["collectives"] * machine.intra_bandwidth
    # The tied table, and what forward ends with.
    once = model.units[0].parameters + model.units[-1].parameters if stage == 3 else 0
    kinds = collective_elements(
        stage, 16, model.parameters, gathered_once=once, accumulation_steps=accumulation
    )
    summed = 4 if accumulation > 1 else 2
    width = {"reduce_scatter": 2 if stage >= 2 else summed, "gather_gradients": summed}
    expected = sum(elements * width.get(kind, 2) for kind, elements in kinds.items())
    assert carried == pytest.approx(expected * 15 / 16)


def test_flops_are_those_of_the_published_formula() -> None:
    shape = TRANSFORMERS["gpt-530b"]
    batch, s, h, layers = 8, shape.sequence, shape.hidden, shape.layers
    result = simulate(shape.cost(), Training(1024, micro_batch=batch), MACHINES["dgx-a100"])
    # As in the Azure post and Narayanan et al. 2021: 96 B s l h² (1 + s/6h + V/16lh).
    assert result.flops == pytest.approx(
        96 * batch * s * layers * h**2 * (1 + s / (6 * h) + shape.vocabulary / (16 * layers * h))
    )
    assert result.model_flops < 0.77 * result.flops
    assert shape.cost().parameters == pytest.approx(530e9, rel=0.01)


@pytest.mark.parametrize("name", ["llama-7b", "gpt-175b", "gpt-1t"])
def test_many_ranks_are_no_more_work_than_few(name: str) -> None:
    model, tiers = transformer_named(name).cost(), {"params": "host", "grads": "host", "optimizer": "nvme"}

    def work(ranks: int) -> int:
        training = Training(ranks, activations="recomputed_host", **tiers)
        return count_opcodes(lambda: simulate(model, training, MACHINES["dgx-a100"]))

    assert work(1024) < 1.5 * work(16)


def test_what_does_not_fit_is_named_with_its_bytes() -> None:
    model = TRANSFORMERS["gpt-10b"].cost()
    one = Training(1, 2, micro_batch=10)
    result = simulate(model, one, MACHINES["dgx2-v100"])
    (short,) = result.shortfalls
    assert not result.fits
    assert short.tier == "device"
    assert short.needed > 16 * model.parameters  # parameters, gradients, masters and moments, and what passes
    assert "too few" in str(short)
    offloaded = replace(one, grads="host", optimizer="host")
    assert simulate(model, offloaded, MACHINES["dgx2-v100"]).fits
    small = MACHINES["dgx2-v100"].replace(host_bytes=10**9)
    assert {short.tier for short in simulate(model, offloaded, small).shortfalls} == {"host"}


def test_the_fastest_placement_fits_and_none_that_fits_is_much_faster() -> None:
    model, machine = TRANSFORMERS["gpt-10b"].cost(), MACHINES["dgx2-v100"]
    found = fastest_placements(model, Training(16, micro_batch=4), machine)
    assert all(one.fits for one in found)
    assert found[0].seconds <= 1.01 * min(one.seconds for one in found)
    assert fastest_placements(TRANSFORMERS["gpt-2t"].cost(), Training(1), machine) == []
    assert not nearest_to_fit(TRANSFORMERS["gpt-2t"].cost(), Training(1), machine).fits


def test_a_small_model_stays_on_the_device() -> None:
    best = fastest_placements(SMALL.cost(), Training(8), MACHINES["dgx-a100"])[0].training
    assert (best.params, best.grads, best.optimizer, best.activations) == (
        "device",
        "device",
        "device",
        "saved",
    )


def test_an_unknown_figure_is_found_from_a_step() -> None:
    model, training = SMALL.cost(), Training(16)
    secret = MACHINES["dgx2-v100"].replace(inter_bandwidth=80e9, matmul_flops=3.21e13)
    seconds = simulate(model, training, secret).seconds
    found = calibrated(MACHINES["dgx2-v100"], "matmul_flops", (1e12, 1e15), model, training, seconds)
    assert found.matmul_flops == pytest.approx(3.21e13, rel=1e-6)
    with pytest.raises(ValueError, match=r"no value between 1e\+12 and 1e\+15"):
        calibrated(MACHINES["dgx2-v100"], "matmul_flops", (1e12, 1e15), model, training, 1e6)
    with pytest.raises(ValueError, match="rising order"):
        calibrated(secret, "matmul_flops", (1.0, 1.0), model, training, seconds)


@pytest.mark.parametrize("mode", ["after_backward", "in_backward"])
@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (2, "device"), (3, "device"), (3, "host")])
def test_a_step_of_muon_sends_and_orthogonalizes_matrices(stage: int, tier: Tier, mode: str) -> None:
    model = transformer_named("llama-7b").cost()
    machine = MACHINES["dgx-a100"].replace(collective_seconds=0.0)
    plain = Training(8, stage, optimizer=tier, update_mode=mode)  # type: ignore[arg-type]
    muon = replace(plain, optimizer_type="Muon")
    before, after = simulate(model, plain, machine), simulate(model, muon, machine)
    assert (after.flops, after.model_flops, before.optimizer_flops) == (before.flops, before.model_flops, 0)

    def busy(what: str) -> float:
        spans = after.timeline.spans
        return sum(span.end - span.begin for span in spans if span.name.startswith(f"{what} "))

    rate = machine.matmul_flops * 0.588
    assert busy("orthogonalize") == pytest.approx(after.optimizer_flops / rate)
    sent = sent_in_step(model, muon, CommunicationConfig()).all
    sent -= step_without_matrices(model, muon)
    wanted = sent / machine.intra_bandwidth if stage else 0.0
    assert busy("matrices") + busy("results") == pytest.approx(wanted, rel=1e-6)
    assert after.seconds > before.seconds
    all_of_it = 32 * 5 * (4 * 6 * 4096**3 + 3 * (4 * 4096**2 * 11008 + 2 * 4096**3))
    owners = 8 if stage else 1
    assert all_of_it / owners <= after.optimizer_flops <= 1.05 * all_of_it / owners


def step_without_matrices(model: ModelCost, training: Training) -> int:
    """Bytes that a rank sends of everything else, in the units of Muon."""
    lengths, once = unit_elements(model, training), lengths_gathered_once(model, training)
    policy = CommunicationConfig()
    sent = step_bytes(training.stage, training.world_size, lengths, policy, gathered_once=once)
    return sum(each.all for each in sent.values())


def test_muon_needs_the_shapes_of_matrices() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    cost = model_cost(model, ZeroConfig.from_mapping({"stage": 3}), 4, sequence=16)
    with pytest.raises(ValueError, match="optimizer_type: expected a model with matrices of known shapes"):
        simulate(cost, Training(4, optimizer_type="Muon"), MACHINES["dgx-a100"])


@pytest.mark.parametrize(
    ("named", "planned"), [("muon", "Muon"), ("Lion", "Lion"), ("SGD", "AdamW"), ("OneBitAdam", "AdamW")]
)
def test_the_optimizer_of_a_configuration(named: str, planned: str) -> None:
    found = Training.of_config({"stage": 1, "optimizer": {"type": named}}, 8)
    assert found.optimizer_type == planned


def test_a_module_has_the_units_of_the_engine() -> None:
    with torch.device("meta"):
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(3)]
        model = torch.nn.Sequential(torch.nn.Embedding(100, 64), *layers)
    cost = model_cost(model, ZeroConfig.from_mapping({"stage": 3}), 4, sequence=16)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    # The embedding computes nothing.
    assert sum(unit.forward_flops for unit in cost.units) == 2 * 3 * 2 * 64 * 64
    assert len(cost.units) == 7
    assert simulate(cost, Training(4), MACHINES["dgx-a100"]).seconds > 0


def test_training_follows_a_configuration() -> None:
    config = {
        "stage": 3,
        "gradient_clipping": 0.0,
        "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
        "offload": {"grads": "host", "optimizer": "nvme", "nvme_paths": ["/nvme"], "update_mode": "delayed"},
        "units": {"prefetch_elements": 7},
    }
    found = Training.of_config(config, 8)
    assert found == Training(
        8,
        3,
        micro_batch=2,
        accumulation_steps=4,
        grads="host",
        optimizer="nvme",
        update_mode="delayed",
        activations="saved",
        clipping=False,
        prefetch_elements=7,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage: expected .*, got 4"),
        ({"stage": 2, "params": "host"}, "params: expected 'device' in stage 2.*, got 'host'"),
        ({"optimizer": "disk"}, "optimizer: expected one of device, host, nvme, got 'disk'"),
        ({"micro_batch": 0}, "micro_batch: expected .*, got 0"),
        ({"update_mode": "delayed"}, "update_mode: expected .* for 'delayed', got 'device'"),
        ({"optimizer_type": "SGD"}, "optimizer_type: expected one of .*Muon, got 'SGD'"),
        ({"activations": "lost"}, "activations: expected .*, got 'lost'"),
    ],
)
def test_a_training_that_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Training(2, **options)  # type: ignore[arg-type]


def test_machines_come_from_json_and_go_back(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for machine in MACHINES.values():
        path.write_text(json.dumps(machine.to_mapping()))
        assert (
            Hardware.load(path).to_mapping() == machine_named(str(path)).to_mapping() == machine.to_mapping()
        )
    path.write_text(json.dumps({**MACHINES["dgx-a100"].to_mapping(), "nvme_read": 0, "speed": 1}))
    with pytest.raises(ValueError, match=r"(?s)machine.json.*(nvme_read.*speed|speed.*nvme_read)"):
        Hardware.load(path)
    with pytest.raises(ValueError, match=r"machine: expected one of dgx2-v100.*, got 'abacus'"):
        machine_named("abacus")
