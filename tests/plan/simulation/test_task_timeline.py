"""Schedules of a few tasks and of two units, with times worked out by hand."""

from __future__ import annotations

import pytest

from zero_ext.plan.simulation import Hardware, ModelCost, Training, UnitCost, simulate
from zero_ext.plan.simulation.task_timeline import Timeline

# Products at 1 FLOP/s, every link at 1 byte/s, kernels in no time: durations below are FLOPs or bytes.
PLAIN = Hardware(
    name="plain",
    ranks_per_node=2,
    matmul_flops=1.0,
    matmul_efficiency=1.0,
    device_bytes=10**9,
    device_bandwidth=1e18,
    host_bytes=10**9,
    host_bandwidth=2.0,
    to_host=1.0,
    to_device=1.0,
    node_to_host=2.0,
    node_to_device=2.0,
    nvme_bytes=10**9,
    nvme_read=2.0,
    nvme_write=2.0,
    intra_bandwidth=1.0,
    inter_bandwidth=1.0,
)
# Two units of 10 elements; a forward takes 30 s, a backward 60 s, a gather 10 elements x 2 bytes / 2 = 10 s.
UNITS = ModelCost("two", (UnitCost("first", 10, 30.0), UnitCost("second", 10, 30.0)), sequence=1)


def spans(
    training: Training, hardware: Hardware = PLAIN, model: ModelCost = UNITS
) -> dict[str, tuple[float, float]]:
    line = simulate(model, training, hardware).timeline
    found = {span.name: (span.begin, span.end) for span in line.spans}
    print(found)
    return found


def two_ranks(**options: object) -> Training:
    return Training(2, **{"activations": "saved", "clipping": False, **options})  # type: ignore[arg-type]


def test_a_task_waits_for_its_resource_and_for_what_it_comes_after() -> None:
    line = Timeline()
    first = line.add("first", "a", 3.0)
    other = line.add("other", "b", 1.0)
    line.add("second", "a", 2.0, [other])
    line.add("third", "b", 1.0, [first])
    assert [(span.begin, span.end) for span in line.spans] == [(0, 3), (0, 1), (3, 5), (3, 4)]
    assert line.end == 5
    assert line.busy == {"a": 5, "b": 2}


def test_stage_3_gathers_the_next_unit_beside_computing_and_reduces_beside_backward() -> None:
    found = spans(two_ranks(stage=3))
    assert found["forward 0"] == (10, 40)
    assert found["forward 1"] == (40, 70)
    assert found["backward 1"] == (70, 130)  # what forward ended with is still there
    assert found["backward 0"] == (130, 190)
    assert found["gather 0"] == (70, 80)  # beside the backward before it
    assert found["reduce 1"] == (130, 140)
    assert found["reduce 0"] == (190, 200)
    assert simulate(UNITS, two_ranks(stage=3), PLAIN).seconds == pytest.approx(200)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({}, [0, 1]),
        ({"looked_up": True}, [1]),  # backward of an embedding does not read it
        ({"tied": True}, [1]),  # the head uses it until the end, and backward first
    ],
)
def test_what_backward_finds_or_does_not_read_is_gathered_once(
    first: dict[str, bool], again: list[int]
) -> None:
    units = tuple(UnitCost(str(number), 10, 30.0, **(first if not number else {})) for number in range(3))
    model = ModelCost("three", units, sequence=1)
    for steps in (1, 2):
        names = [
            span.name
            for span in simulate(model, two_ranks(stage=3, accumulation_steps=steps), PLAIN).timeline.spans
        ]
        for number in range(3):
            assert names.count(f"gather {number}") == steps * (1 + (number in again)), (number, steps)


def test_without_look_ahead_every_gather_is_waited_for() -> None:
    # Three gathers of 10 s more, of which the last has to wait for the reduction before it.
    assert simulate(UNITS, two_ranks(stage=3, prefetch_elements=0), PLAIN).seconds == pytest.approx(240)


def test_stage_1_gathers_nothing_before_and_what_was_updated_after() -> None:
    found = spans(two_ranks(stage=1))
    assert found["forward 1"] == (30, 60)
    assert found["backward 0"] == (120, 180)
    assert found["reduce 0"] == (180, 190)
    assert found["gather updated 0"][0] == pytest.approx(190)
    assert found["gather updated 1"][1] == pytest.approx(210)


def test_stage_0_reduces_and_gathers_gradients_once_a_step() -> None:
    found = spans(two_ranks(stage=0, accumulation_steps=2))
    names = [
        span.name for span in simulate(UNITS, two_ranks(stage=0, accumulation_steps=2), PLAIN).timeline.spans
    ]
    assert names.count("reduce 0") == names.count("gather gradient 0") == 1
    assert names.count("forward 0") == 2
    # Summed in fp32: 10 elements x 4 bytes / 2 = 20 s each way, behind the other unit's.
    assert found["reduce 0"] == pytest.approx((360, 380))
    assert found["gather gradient 0"] == pytest.approx((380, 400))


def test_an_optimizer_on_the_host_copies_gradients_down_beside_backward_and_parameters_back() -> None:
    found = spans(two_ranks(stage=2, grads="host", optimizer="host"))
    # Backward is that of stage 1. A shard is 5 elements: 10 s of copies; an update moves 28 bytes an
    # element at the rank's half of 2 bytes/s: 140 s.
    assert found["gradient 1"] == (130, 140)
    assert found["gradient 0"] == (190, 200)
    assert found["update 0"] == (200, 340)
    assert found["parameters 0"] == (340, 350)
    assert found["gather updated 0"] == (350, 360)
    assert found["update 1"] == (340, 480)
    assert found["gather updated 1"] == (490, 500)


def test_parameters_on_nvme_are_read_two_units_ahead() -> None:
    units = ModelCost("four", tuple(UnitCost(str(number), 10, 30.0) for number in range(4)), sequence=1)
    training = two_ranks(stage=3, params="nvme", optimizer="nvme", prefetch_elements=1)
    line = simulate(units, training, PLAIN).timeline
    first = {}
    for span in line.spans:
        first.setdefault(span.name, (span.begin, span.end))
    # A shard of 5 elements: 10 s to read at the rank's half of 2 bytes/s, 10 s to the device, 10 s to gather.
    assert first["fetch 0"] == (0, 10)
    assert first["shard 0"] == (10, 20)
    assert first["gather 0"] == (20, 30)
    assert first["forward 0"] == (30, 60)
    assert first["fetch 1"] == (30, 40)
    assert first["fetch 2"] == (40, 50)
    # Read already. The engine's host would wait for the read to exchange it before forward 0.
    assert first["shard 1"] == (60, 70)
    assert first["gather 1"] == (70, 80)
    assert first["forward 1"] == (80, 110)
    assert first["fetch 3"] == (80, 90)
    assert first["gather 2"] == (90, 100)  # beside forward 1, as it comes next
    assert first["forward 2"] == (110, 140)
    assert first["gather 3"] == (120, 130)
    assert first["forward 3"] == (140, 170)


def test_state_on_nvme_streams_through_a_ring() -> None:
    one = ModelCost("one", (UnitCost("only", 256 * 2, 1.0),), sequence=1)
    hardware = PLAIN.replace(host_bandwidth=1e18, ranks_per_node=1, nvme_read=12.0, nvme_write=12.0)
    training = Training(1, 3, grads="host", optimizer="nvme", activations="saved", clipping=False)
    line = simulate(one, training, hardware).timeline
    reads = [span for span in line.spans if span.name.startswith("read state")]
    writes = [span for span in line.spans if span.name.startswith("write state")]
    assert len(reads) == len(writes) == 256  # 2 elements x 12 bytes: 2 s each way, at the same time
    assert writes[-1].end - reads[0].begin == pytest.approx(257 * 2)
    turns = simulate(one, training, hardware.replace(nvme_half_duplex=True)).timeline
    moved = [span for span in turns.spans if span.resource == "NVMe"]
    assert moved[-1].end - moved[0].begin == pytest.approx(512 * 2)
    slow = simulate(one, training, hardware.replace(nvme_write=6.0)).timeline
    reads = [span for span in slow.spans if span.name.startswith("read state")]
    writes = [span for span in slow.spans if span.name.startswith("write state")]
    for number in range(8, 256):  # the ring holds eight pieces; a write takes 4 s
        assert reads[number].begin == max(reads[number - 1].end, writes[number - 8].end)


def test_backward_waits_for_the_reduction_before_the_last_two() -> None:
    five = ModelCost("five", tuple(UnitCost(str(number), 10, 30.0) for number in range(5)), sequence=1)
    found = spans(two_ranks(stage=2), PLAIN.replace(intra_bandwidth=0.1), five)
    assert found["backward 4"] == (150, 210)
    assert found["reduce 4"] == pytest.approx((210, 310))
    assert found["reduce 3"] == pytest.approx((310, 410))
    assert found["backward 1"] == pytest.approx((330, 390))
    assert found["backward 0"] == pytest.approx((410, 470))


def test_memory_is_that_of_the_formula_and_of_what_passes_through() -> None:
    sizes = ModelCost("three", tuple(UnitCost(str(n), 10, 30.0, 7.0, 5.0) for n in range(3)), sequence=2)
    needs = simulate(sizes, two_ranks(stage=3, optimizer="host", activations="recomputed"), PLAIN).memory
    # Units of 10 elements have the 32 of 64 bytes on each rank, and where they are stored a block of 2048.
    assert needs.device == {
        "params": 3 * 32 * 2,
        "grads": 3 * 32 * 2,
        # Three gathered, gradients of two and the third one's parameters' place; what two reductions receive.
        "passing through": 6 * 4096,
        "activations": 14,
        "outputs of blocks": 30,
        "autograd": 2 * 32 * 2 + 10 * 2,  # and what the next unit brings first
        "NCCL": 2 * 32 * (4 << 20),
    }
    state = 3 * 32 * 12
    assert needs.host == {"optimizer": state, "staging": 2 * 4096}  # a page for gradients, one for parameters
    assert needs.total("host") == 2 * (state + 2 * 4096)  # both ranks of the node
    stored = simulate(sizes, two_ranks(stage=3, params="nvme", activations="recomputed_host"), PLAIN).memory
    assert stored.nvme == {"params": 3 * 4096}
    assert stored.host["outputs of blocks"] == 30


def test_updates_in_backward_hold_it_up_and_leave_nothing_for_the_step() -> None:
    options = {"stage": 2, "grads": "host", "optimizer": "host"}
    after, within = (
        spans(Training(1, activations="saved", clipping=False, update_mode=step, **options))  # type: ignore[arg-type]
        for step in ("after_backward", "in_backward")
    )
    # One rank: a gradient of 10 elements takes 20 s to the host, its update 280 bytes at 2 bytes/s.
    assert after["update 0"] == (200, 340)
    assert within["gradient 1"] == (120, 140)
    assert within["update 1"] == (140, 280)
    assert within["backward 0"] == (280, 340)
    assert within["update 0"] == (360, 500)
    assert within["parameters 0"][0] == 500


def test_delayed_updates_run_beside_forward_and_backward() -> None:
    options = {"stage": 2, "grads": "host", "optimizer": "host", "activations": "saved", "clipping": False}
    found = spans(Training(1, update_mode="delayed", **options))  # type: ignore[arg-type]
    assert found["update 0"] == (0, 140)
    assert found["forward 0"] == (0, 30)
    assert found["parameters 0"][0] == found["parameters 1"][0] - 20 == 280  # update 1 ends there
    assert simulate(UNITS, Training(1, update_mode="delayed", **options), PLAIN).seconds == 320  # type: ignore[arg-type]


def test_outputs_of_blocks_leave_for_the_host_and_come_back() -> None:
    units = tuple(UnitCost(str(number), 10, 30.0, output=5.0) for number in range(2))
    training = Training(1, 0, activations="recomputed_host", clipping=False)
    found = spans(training, model=ModelCost("two", units, sequence=1))
    assert found["offload output 0"] == (30, 35)
    assert found["fetch output 1"] == (65, 70)  # once it has arrived there
    assert found["backward 1"] == (70, 160)  # forward again, 30 s, and backward
    assert found["backward 0"] == (165, 255)


def test_a_machine_without_accelerator_does_one_thing_at_a_time() -> None:
    hardware = PLAIN.replace(device_is_host=True, device_bandwidth=2.0)
    result = simulate(UNITS, two_ranks(stage=3), hardware)
    assert set(result.busy) == {"compute"}
    assert result.seconds == pytest.approx(result.busy["compute"])
