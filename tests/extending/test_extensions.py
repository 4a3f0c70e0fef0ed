"""The extensions that CONTRIBUTING describes, each registered from outside the package and then used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_ext
from tests.monitor.watched import prepared, train
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.memory_range import alone, device_tiers
from zero_ext.config import ConfigError, load_deepspeed_config, optimizer_traits
from zero_ext.config.deepspeed import translate
from zero_ext.config.deepspeed.deepspeed_keys import integer, supported, unsupported
from zero_ext.config.events import COLLECTIVE_KINDS, CollectiveEnd, CollectiveKind, Event
from zero_ext.config.optimizer_traits import OptimizerTraits
from zero_ext.monitor import EngineBytes, Monitor, StepTimes
from zero_ext.optim import optimizer_registry
from zero_ext.optim.fused import FusedStepper
from zero_ext.optim.moments import FloatMoments
from zero_ext.optim.optimizer_registry import fusible, make_stepper, register, resumes_from
from zero_ext.optim.stepper import Segment, StepperInputs
from zero_ext.parallel import apply_tensor_parallel, make_mesh
from zero_ext.parallel.tensor.tp_plans import PLANS
from zero_ext.zero import engine_of

TRAITS = OptimizerTraits(
    "ToyMomentum",
    __name__,
    ("momentum",),
    resumes_from=frozenset({"ToyPlain"}),
    deepspeed_defaults={"decay": 0.5},
)


class ToyMomentum(torch.optim.Optimizer):
    """Momentum without dampening, as SGD(momentum=decay) steps."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("the fused stepper runs instead")


class ToyPlain(torch.optim.SGD):
    """An element-wise optimizer, whose own code runs on shards."""


def toy_momentum_step_(
    master: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    parameter: torch.Tensor | None,
    segments: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor,
    non_finite: torch.Tensor | None = None,
) -> None:
    """Step all segments in place, with the arguments of a fused op."""
    for (begin, end), (lr, decay) in zip(segments.tolist(), hyper.tolist(), strict=True):
        momentum[begin:end].mul_(decay).add_(gradient[begin:end] * scale)
        master[begin:end].add_(momentum[begin:end], alpha=-lr)
        if parameter is not None:
            parameter[begin:end] = master[begin:end]


class ToyMomentumStepper(FusedStepper):
    """The step of ToyMomentum on flat shards."""

    def __init__(self, inputs: StepperInputs) -> None:
        moments = FloatMoments(inputs.ranges, inputs.moments_dtype, toy_momentum_step_, TRAITS.moments)
        super().__init__(inputs, moments)

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        group = self._groups[segment.group]
        return [float(group["lr"]), float(group["decay"])]

    def scalars(self) -> dict[str, Any]:
        return {}

    def load_scalars(self, state: dict[str, Any]) -> None:
        assert not state


@pytest.fixture
def toy_optimizers() -> Iterator[None]:
    tables: tuple[dict[str, Any], ...] = (optimizer_traits.OPTIMIZERS, optimizer_registry.ENTRIES)
    before = [dict(each) for each in tables]
    register(TRAITS, ToyMomentum, ToyMomentumStepper)
    register(OptimizerTraits("ToyPlain", __name__), ToyPlain)
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("name", "momentum"), [("toymomentum", 0.5), ("TOYPLAIN", 0.0)])
@pytest.mark.usefixtures("toy_optimizers")
def test_an_optimizer_trains_from_deepspeeds_json_as_the_same_one_of_torch(
    name: str, momentum: float, stage: int
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.2, momentum=momentum)
    config = {
        "optimizer": {"type": name, "params": {"lr": 0.2}},
        "train_batch_size": 5,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, *_ = zero_ext.initialize(model=model, config=config)
    for _ in range(3):
        inputs = torch.randn(5, 4)
        engine.backward(engine(inputs).square().mean())
        engine.step()
        twin(inputs).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for key, value in zero_ext.full_state_dict(model).items():
        torch.testing.assert_close(value, twin.state_dict()[key], rtol=1e-6, atol=1e-7)
    assert fusible(optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer) == bool(momentum)


@pytest.mark.usefixtures("toy_optimizers")
def test_what_follows_from_the_row_of_an_optimizer() -> None:
    assert load_deepspeed_config(
        {"optimizer": {"type": "ToyMomentum", "params": {"lr": 1.0}}}
    ).config.optimizer == zero_ext.config.OptimizerConfig(
        type="ToyMomentum", params={"lr": 1.0, "decay": 0.5}
    )
    assert resumes_from("ToyMomentum", "ToyPlain") and not resumes_from("ToyPlain", "ToyMomentum")
    optimizer = ToyMomentum(nn.Linear(4, 3).parameters())
    with pytest.raises(ValueError, match=r"precision.moments_dtype: .* got ToyMomentum"):
        make_stepper(optimizer, [], "8bit", False, device_tiers(), alone)
    with pytest.raises(
        ConfigError, match=r"expected a known optimizer, got 'ToyMomentun'.* Did you mean ToyMomentum"
    ):
        zero_ext.load_config({"optimizer": {"type": "ToyMomentun"}})


@pytest.fixture
def toy_keys() -> Iterator[None]:
    before = dict(translate.KEYS), set(translate.SECTIONS)
    translate.register_key(supported("toy.seed", integer(0), "seed of the data order", "seed"))
    translate.register_key(unsupported("toy.dice", integer(1), "There are none. Remove it", 6))
    yield
    for table, rows in zip((translate.KEYS, translate.SECTIONS), before, strict=True):
        table.clear()
        table.update(rows)  # type: ignore[arg-type]


@pytest.mark.usefixtures("toy_keys")
def test_a_deepspeed_key_is_read_checked_and_refused() -> None:
    assert load_deepspeed_config({"toy": {"seed": 7, "dice": 6}}).config.seed == 7
    for source, message in (
        ({"seed": -1}, "toy.seed: expected an integer of at least 0, got -1"),
        ({"dice": 5}, "toy.dice: got 5.*, which is unsupported. There are none. Remove it."),
        ({"sed": 1}, "toy.sed: .*Did you mean toy.seed"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_deepspeed_config({"toy": source})


class RecordingBackend:
    """A backend of monitors that keeps rows."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.closed = False

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def close(self) -> None:
        self.closed = True


@on_ranks(2)
def test_a_monitor_backend_gets_the_bytes_and_waits_of_a_kind_of_collective(world: World) -> None:
    COLLECTIVE_KINDS["toy"] = CollectiveKind("gather", in_rows=True)
    try:
        model, optimizer = prepared(world, 3)
        engine, backend = engine_of(model), RecordingBackend()
        monitor = Monitor(engine, [backend], [EngineBytes(engine), StepTimes()])
        waits = {"toy": 0.0, "others": 0.0}

        def add_up(event: Event) -> None:
            if isinstance(event, CollectiveEnd) and (event.kind == "toy" or event.kind.startswith("gather")):
                waits["toy" if event.kind == "toy" else "others"] += event.seconds

        engine.subscribe(add_up)
        full = torch.full((6,), float("nan"))
        engine.collectives.gather(full, torch.full((3,), float(world.rank)), "toy", "toy values").wait()
        train(world, model, optimizer, 1)
        monitor.close()
        assert full.tolist() == [0.0] * 3 + [1.0] * 3
        (row,) = backend.rows
        assert row["step"] == 1 and backend.closed
        assert row["traffic/toy"] == 3 * 4  # what one rank sends to the other
        assert waits["toy"] > 0 and row["wait/gather"] == pytest.approx(sum(waits.values()))
    finally:
        del COLLECTIVE_KINDS["toy"]


class ToyFamily(nn.Module):
    """A model with a model type that transformers does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="toy")
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = values + block["down"](torch.tanh(block["up"](values)))  # type: ignore[index]
        return values


@on_ranks(4)
def test_a_model_family_is_split_by_its_plan_and_trains_as_on_one_rank(world: World) -> None:
    PLANS["toy"] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    try:
        torch.manual_seed(world.seed)
        model, twin = ToyFamily(), ToyFamily()
        twin.load_state_dict(model.state_dict())
        inputs = torch.randn(5, 4)
        mesh = make_mesh(tp=2, device_type="cpu")
        apply_tensor_parallel(model, mesh)
        weight = model.get_parameter("blocks.0.up.weight")
        assert isinstance(weight, DTensor) and weight.to_local().shape == (4, 4)
        plain = torch.optim.AdamW(twin.parameters(), lr=0.01)
        prepared_model, optimizer = zero_ext.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), {"stage": 3}, process_group=mesh
        )
        for _ in range(3):
            losses = [net(inputs).square().mean() for net in (prepared_model, twin)]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
            for loss, stepper in zip(losses, (optimizer, plain), strict=True):
                loss.backward()
                stepper.step()
                stepper.zero_grad()
    finally:
        del PLANS["toy"]
