"""Adafactor over shards: torch's and transformers' own in one process, in every stage, tier and number of
ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from tests.checkpoint.mutations import edit_manifest
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.memory_range import alone, device_tiers, memory_range, step_one
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import (
    Plan,
    check_close,
    check_equal,
    check_same,
    configuration,
    placed,
    train_in_tiers,
    train_plain,
)
from tests.zero.training import prepared as prepare_for
from zero_ext.checkpoint.inspection import inspect_checkpoint
from zero_ext.config import OptimizerConfig
from zero_ext.optim import Segment, make_stepper
from zero_ext.optim.adafactor import FactoredLayout, adafactor_settings
from zero_ext.optim.optimizer_builder import build_optimizer
from zero_ext.zero import engine_of

Parameters = dict[str, torch.Tensor]
STEPS = 20
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
NVME = dict.fromkeys(HOST, "nvme")
PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"optimizer": "host"}),
    (2, {}),
    (2, {"optimizer": "nvme"}),
    (3, {}),
    (3, HOST),
    (3, NVME),
]
MIXED = {"units": {"persistence_threshold": 100, "bucket_elements": 600}}
TRANSFORMERS = {"library": "transformers"}
FIXED = {**TRANSFORMERS, "lr": 1e-2, "relative_step": False}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "weight_decay": 0.1},
    {"maximize": True, "lr": 1e-3},
    {"eps": (1e-2, 0.5), "d": 3.0, "beta2_decay": -0.5},
    TRANSFORMERS,
    {**TRANSFORMERS, "warmup_init": True, "decay_rate": -0.5, "clip_threshold": 0.3},
    {**FIXED, "scale_parameter": False},
    {**FIXED, "beta1": 0.9, "weight_decay": 0.1},
    {**FIXED, "eps": (1e-3, 0.2), "clip_threshold": 0.0},
]


class Shapes(nn.Module):
    """Weights of 0 to 4 dimensions, in several memory orders; idle, frozen and empty ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.last = nn.Conv2d(4, 4, (2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = nn.Linear(4 * 3 * 2, 37)
        self.columns = nn.Parameter(torch.randn(5, 37).T.mul(0.2))
        self.stack = nn.Parameter(torch.randn(3, 5, 7).mul(0.3))
        self.odd = nn.Parameter(torch.randn(7, 2, 3).permute(1, 0, 2).contiguous().transpose(0, 1).mul(0.4))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.idle = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 1)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Values [n] for images [n, 3, 6, 6]."""
        hidden = self.last(self.convolution(images).tanh()).tanh()
        hidden = self.linear(hidden.flatten(1)).tanh() @ self.columns
        hidden = torch.einsum("ni,kij->nkj", hidden.tanh(), self.stack).tanh()
        hidden = torch.einsum("nkj,jlk->nl", hidden, self.odd.tanh())
        return self.frozen(hidden.repeat(1, 3)).squeeze(1) * self.scale + self.empty.sum()


def loss_of(model: nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * step + rank)
    dtype = next(model.parameters()).dtype
    images = torch.randn(6, 3, 6, 6, generator=generator).to(dtype)
    return nn.functional.mse_loss(model(images), images.mean((1, 2, 3)) + 2.0)


def make(parameters: Iterable[Any], library: str = "torch", **settings: Any) -> torch.optim.Optimizer:
    if library == "torch":
        return torch.optim.Adafactor(parameters, **settings)
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **settings)  # type: ignore[no-untyped-call]


def plain(
    world: World, steps: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[list[list[float]], Parameters]:
    """Losses by step and rank, and the parameters after it, of the library's own optimizer."""
    model, losses = Shapes(world.seed).to(dtype), []
    # torch divides by the number of elements.
    optimizer = make([each for each in model.parameters() if each.numel()], **settings)
    for step in range(steps):
        found = [loss_of(model, world.seed, step, rank) for rank in range(world.size)]
        # As on ranks, their gradients are added up, then divided: rounding is large where they cancel out.
        for loss in found:
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world.size
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def prepared(world: World, stage: int, section: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    model = Shapes(world.seed)
    config = configuration(stage, offload=section, **MIXED)
    return zero_ext.prepare(model, make(model.parameters(), **settings), config, process_group=world.group)


def train(world: World, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model, world.seed, step, world.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def relative_distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference in units of the norm of what is wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def check_rounding(found: Parameters, library: Parameters, exact: Parameters, case: Any) -> None:
    """``found`` is near ``exact``, float64's: steps magnify rounding, and the library's own distance shows by
    how much."""
    for name, wanted in exact.items():
        error, rounding = (relative_distance(each[name], wanted) for each in (found, library))
        assert library[name].isfinite().all(), (case, name)
        assert error <= max(1e-6, 2 * rounding), (case, name, error, rounding)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("settings", [{}, {**TRANSFORMERS, "beta1": 0.5}], ids=["torch", "transformers"])
def test_equals_the_librarys_own(world: World, settings: dict[str, Any]) -> None:
    losses, parameters = plain(world, STEPS, **settings)
    _, exact = plain(world, STEPS, dtype=torch.float64, **settings)
    seen: dict[str, torch.Tensor] = {}
    for stage, offload in PLACEMENTS:
        with placed(offload) as section:
            model, optimizer = prepared(world, stage, section, **settings)
            own = train(world, model, optimizer, 0, STEPS)
            found = zero_ext.full_state_dict(model, rank0_only=False)
        # A loss that falls to nearly nothing is a difference of values of the first one's size.
        expected = pytest.approx([each[world.rank] for each in losses], rel=1e-6, abs=1e-6 * own[0])
        assert own == expected, (stage, offload)
        check_rounding(found, parameters, exact, (stage, offload))
        seen = seen or found
        assert all(torch.equal(found[name], value) for name, value in seen.items()), (stage, offload)


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_options(world: World, settings: dict[str, Any]) -> None:
    _, parameters = plain(world, 5, **settings)
    _, exact = plain(world, 5, dtype=torch.float64, **settings)
    for stage, offload in ((2, {}), (3, {"optimizer": "nvme"})):
        with placed(offload) as section:
            model, optimizer = prepared(world, stage, section, **settings)
            train(world, model, optimizer, 0, 5)
            found = zero_ext.full_state_dict(model, rank0_only=False)
        check_rounding(found, parameters, exact, (stage, offload))


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_accumulation_clipping_and_low_precision(world: World, dtype: str) -> None:
    plan = Plan(micro_batches=2 if dtype == "fp32" else 1, clip=0.5, dtype=dtype)

    def own(parameters: Any) -> torch.optim.Optimizer:
        return make(parameters, **FIXED, beta1=0.9)

    precision = {"precision": {"dtype": dtype, "moments_dtype": "bf16"}} if dtype == "bf16" else {}
    runs = [
        train_in_tiers(world, stage, plan, offload, own, **precision)
        for stage, offload in ((1, {}), (2, {"grads": "nvme"}), (3, HOST), (3, {**NVME, "ratio": 0.5}))
    ]
    torch.manual_seed(world.seed)
    reference = train_plain(world, TinyModel(), language_loss, language_batch, plan, own)
    for run in runs:
        check_close(run, reference, 1e-6 if dtype == "fp32" else 8e-3)
        if dtype != "fp32":  # stages add up micro-batches in different orders
            check_equal(run, runs[0])


@on_ranks(2)
def test_a_skipped_step_changes_nothing(world: World) -> None:
    scale = {"precision": {"dtype": "fp16"}, "loss_scale": {"initial_power": 40}}
    model, optimizer = prepare_for(world, TinyModel(), 2, torch.optim.Adafactor, **scale)
    before = zero_ext.full_state_dict(model, rank0_only=False)
    for step in range(2):
        model.backward(language_loss(model, language_batch(world.seed, step, 0, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    assert engine_of(model).optimizer_step.skipped_steps == 2
    check_same(zero_ext.full_state_dict(model, rank0_only=False), before)
    assert not any(state["scalars"]["step"].values())
    assert not any(values.any() for values in state["unsharded"].values())


@on_ranks(2)
@pytest.mark.parametrize("settings", [{"lr": 0.3}, {**TRANSFORMERS, "beta1": 0.5}], ids=str)
def test_resumed_in_another_stage_and_tier(world: World, settings: dict[str, Any]) -> None:
    folder = world.shared_folder()
    with placed({"grads": "host", "optimizer": "nvme"}) as section:
        model, optimizer = prepared(world, 3, {}, **settings)
        train(world, model, optimizer, 0, 3)
        zero_ext.save_checkpoint(folder, model)
        stored = inspect_checkpoint(folder).bytes_by_kind
        saved = optimizer.state_dict()
        train(world, model, optimizer, 3, 6)
        wanted = zero_ext.full_state_dict(model, rank0_only=False)
        for stage, offload in ((2, section), (0, {}), (3, {})):
            model, optimizer = prepared(world, stage, offload, **settings)
            zero_ext.load_checkpoint(folder, model)
            train(world, model, optimizer, 3, 6)
            check_same(zero_ext.full_state_dict(model, rank0_only=False), wanted)
        optimizer.load_state_dict(saved)
        train(world, model, optimizer, 3, 6)
        check_same(zero_ext.full_state_dict(model, rank0_only=False), wanted)
    twin = Shapes(world.seed)
    reference = make([each for each in twin.parameters() if each.numel()], **settings)
    loss_of(twin, 0, 0, 0).backward()
    reference.step()
    for name, parameter in twin.named_parameters():
        shapes = {kind: each.shape for kind, each in reference.state[parameter].items() if "_" in kind}
        for kind, shape in shapes.items() if parameter.dim() > 1 and parameter.numel() else ():
            assert kind == "exp_avg" or saved["unsharded"][f"{kind}/{name}"].shape == shape, (kind, name)
            assert stored[kind] >= 4 * shape.numel()


def edit_step(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        steps = fields["scalar_state"]["optimizer"]["step"]
        steps[min(steps)] = value

    return change


@on_ranks(1)
def test_steps_in_checkpoints_are_checked(world: World) -> None:
    folder = world.shared_folder()
    model, optimizer = prepared(world, 2, {})
    train(world, model, optimizer, 0, 1)
    zero_ext.save_checkpoint(folder, model)
    before = optimizer.state_dict()["scalars"]
    for value in (-1, "x", None, 1.5, True, 1 << 62):
        edit_manifest(Path(inspect_checkpoint(folder).path), edit_step(value))
        with pytest.raises(ValueError, match="Nothing of the model was changed") as caught:
            zero_ext.load_checkpoint(folder, model)
        assert f"optimizer state of '{min(before['step'])}': expected a number of steps" in str(caught.value)
        assert optimizer.state_dict()["scalars"] == before


@on_ranks(3)
def test_resumed_by_other_ranks(world: World) -> None:
    """One rank saves alone, and three have its state."""
    own = [dist.new_group([rank], use_local_synchronization=True) for rank in range(world.size)][world.rank]
    folder, alone_there = world.shared_folder(), world._replace(rank=0, size=1, group=own)
    if world.rank == 0:
        model, optimizer = prepared(alone_there, 2, {})
        train(alone_there, model, optimizer, 0, 3)
        zero_ext.save_checkpoint(folder, model)
    world.everyone(None)
    model, optimizer = prepared(world, 3, {})
    zero_ext.load_checkpoint(folder, model)
    unsharded = optimizer.state_dict()["unsharded"]
    model, optimizer = prepared(alone_there, 1, {})
    zero_ext.load_checkpoint(folder, model)
    check_same(unsharded, optimizer.state_dict()["unsharded"])
    assert all(
        values.any()
        for key, values in unsharded.items()
        if not {"idle", "frozen"} & set(key.split("/")[1].split("."))
    )


@on_ranks(2)
def test_state_is_small_and_no_matrix_travels(world: World) -> None:
    """Fp32 masters are the parameters, so that rows, columns and vectors are all that the optimizer adds."""
    for stage, tier in ((2, "device"), (2, "host"), (3, "nvme")):
        with placed({"optimizer": tier}) as section:
            model, optimizer = prepared(world, stage, section)
            train(world, model, optimizer, 0, 2)
            engine = engine_of(model)
            unsharded = optimizer.state_dict()["unsharded"]
            nbytes = sum(4 * values.numel() for values in unsharded.values())
            vectors = sum(
                values.nbytes
                for key, values in optimizer.state_dict()["shards"].items()
                if key.startswith("variance/")
            )
            near = "host" if tier == "nvme" else tier
            assert engine.optimizer_step.stepper.state_bytes()[near] == nbytes + vectors
            if tier == "device":
                assert engine.memory_by_tier()["device"]["optimizer"] == nbytes + vectors
            used = [each for each in Shapes(0).parameters() if each.requires_grad and each.numel()][:-2]
            rows_and_columns = sum(
                each.numel() // each.shape[-1] + each.numel() // each.shape[-2]
                for each in used
                if each.dim() > 1
            )
            sums = engine.traffic.last_elements["scalars"]
            assert rows_and_columns + 2 * len(used) <= sums <= rows_and_columns + 2 * len(used) + 120


def in_order(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Values of ``shape`` whose dimensions lie in memory in ``order``."""
    values = torch.randn([shape[dim] for dim in order], generator=torch.Generator().manual_seed(1))
    return values.permute([list(order).index(dim) for dim in range(len(shape))])


@pytest.mark.parametrize("shape", [(5, 7), (1, 4), (6, 1), (3, 4, 5), (2, 1, 3, 4)], ids=str)
def test_slices_in_any_memory_order(shape: tuple[int, ...]) -> None:
    settings = adafactor_settings(make([torch.zeros(1)]).param_groups[0], 1)
    for order in itertools.permutations(range(len(shape))):
        values = in_order(shape, order)
        row, column = values.square().mean(-1), values.square().mean(-2)
        variance = row.unsqueeze(-1) * column.unsqueeze(-2) / row.mean(-1)[..., None, None]
        layout, flat = FactoredLayout(shape, values.stride()), values.as_strided((values.numel(),), (1,))
        factors, found = layout.factors(settings.normalized(row), column), torch.empty_like(values)
        roots = found.as_strided((values.numel(),), (1,))
        for step in (1, 3, 8, 1000):
            sums = [torch.zeros(numel, dtype=torch.float64) for numel in layout.numels()]
            for begin in range(0, values.numel(), step):
                values_slice = flat[begin : begin + step]
                layout.add_squares(values_slice, begin, *sums)
                roots[begin : begin + step] = layout.inverse_roots(
                    settings, factors, begin, values_slice.numel()
                )
            torch.testing.assert_close(layout.rows_of(sums[0]).float(), row * shape[-1])
            torch.testing.assert_close(layout.columns_of(sums[1]).float(), column * shape[-2])
            torch.testing.assert_close(found, variance.rsqrt())


def test_rollback_restores_all_state() -> None:
    segments = (
        Segment("matrix", 0, 0, 12, 0, (3, 4), (4, 1)),
        Segment("vector", 0, 16, 5, 0, (5,), (1,)),
    )
    optimizer = make([nn.Parameter(torch.ones(1))], **FIXED, beta1=0.5)
    owned = memory_range(torch.randn(32), None, segments)
    stepper = make_stepper(optimizer, [owned], torch.float32, False, device_tiers(), alone)

    def state() -> dict[str, torch.Tensor]:
        found = {f"{kind}/{segment.name}": values.clone() for kind, segment, values in stepper.values(0)}  # type: ignore[union-attr]
        found |= {f"{each.kind}/{each.name}": each.tensor.clone() for each in stepper.unsharded_values()}
        steps = {f"step/{name}": torch.tensor(step) for name, step in stepper.scalars()["step"].items()}
        return found | steps | {"master": owned.state.read("master", 0, 32).clone()}

    def step() -> None:
        step_one(stepper, torch.randn(32), torch.tensor(1.0), frozenset({"matrix", "vector"}))

    step()
    before = state()
    stepper.snapshot(0)
    step()
    assert not any(torch.equal(values, before[key]) for key, values in state().items())
    stepper.rollback(0)
    check_same(state(), before)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"offload": {"update_mode": "in_backward"}}, "expected 'after_backward' with Adafactor, got 'in_b"),
    (
        TRANSFORMERS,
        {"offload": {"update_mode": "delayed", "optimizer": "host"}},
        "with Adafactor, got 'delayed'",
    ),
    ({}, {"units": {"tiles": {"linear": 2}}}, "units.tiles: expected none with Adafactor"),
    (
        TRANSFORMERS,
        {"precision": {"dtype": "bf16", "moments_dtype": "8bit"}},
        "expected Adam or AdamW .*, got Adaf",
    ),
]


@pytest.mark.parametrize(("settings", "config", "message"), REFUSED)
def test_refusals(settings: dict[str, Any], config: dict[str, Any], message: str) -> None:
    model = Shapes(0)
    with pytest.raises(ValueError, match=message):
        zero_ext.prepare(model, make(model.parameters(), **settings), {"stage": 2, **config})


def test_a_subclass_is_refused() -> None:
    model = nn.Linear(4, 4)
    kind = type("Other", (torch.optim.Adafactor,), {})
    with pytest.raises(ValueError, match="Other: it is not known to be element-wise"):
        zero_ext.prepare(model, kind(model.parameters()), {"stage": 2})


@pytest.mark.parametrize("params", [{}, {"lr": 0.02, "eps": [None, 1e-2], "d": 2}, {"eps": [1e-6, 1e-3]}])
def test_the_name_in_a_configuration(params: dict[str, Any]) -> None:
    built = build_optimizer(OptimizerConfig(type="adafactor", params=params), [torch.ones(1)])
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    wanted = torch.optim.Adafactor([torch.ones(1)], **tuples)
    assert type(built) is type(wanted) and built.defaults == wanted.defaults


def test_a_relative_step_has_no_rate_of_its_own() -> None:
    model = nn.Linear(4, 1)
    model, optimizer = zero_ext.prepare(model, make(model.parameters(), **TRANSFORMERS), {"stage": 2})
    events: list[Any] = []
    engine_of(model).subscribe(events.append)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (end,) = (event for event in events if type(event).__name__ == "StepEnd")
    assert math.isnan(end.lr[0])
