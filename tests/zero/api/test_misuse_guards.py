"""The commonest ways to read, copy or overwrite sharded parameters: right, or an error naming the call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, TinyModel, feature_batch, feature_loss, language_batch, language_loss
from tests.zero.training import (
    adamw,
    check_near,
    check_same,
    prepared,
    train_step,
)
from zero_ext.zero import engine_of


class Scalars(nn.Module):
    """One-element parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features) * self.gain + self.offset


def no_grad(action: Callable[[Any], Any]) -> Callable[[Any], None]:
    def act(module: Any) -> None:
        with torch.no_grad():
            action(module)

    return act


WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": no_grad(lambda m: m.layer.weight.zero_()),
    "masked_fill_": no_grad(
        lambda m: m.layer.weight.masked_fill_(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 2.0)
    ),
    "index_fill_": no_grad(lambda m: m.layer.weight.index_fill_(0, torch.tensor([0]), 2.0)),
    "mul_": no_grad(lambda m: m.layer.weight.mul_(2)),
    "copy_": no_grad(lambda m: m.layer.weight.copy_(torch.ones(WIDTH, WIDTH))),
    "setitem": no_grad(lambda m: m.layer.weight.__setitem__(0, 1.0)),
    "init.normal_": lambda m: nn.init.normal_(m.layer.weight),
    "reset_parameters": lambda m: m.layer.reset_parameters(),
    "one element mul_": no_grad(lambda m: m.gain.mul_(2)),
    "one element setitem": no_grad(lambda m: m.gain.__setitem__(0, 3.0)),
    "zero-dim add_": no_grad(lambda m: m.offset.add_(1)),
    "init.ones_ of one element": lambda m: nn.init.ones_(m.gain),
    "data.fill_ of one element": lambda m: m.gain.data.fill_(2.0),
    "data = ": lambda m: setattr(m.layer.weight, "data", torch.ones(WIDTH, WIDTH)),
    "through a view": no_grad(lambda m: m.layer.weight.view(-1)[2:5].fill_(2.0)),
    "through a view that autograd sees": lambda m: m.layer.weight[1].data.mul_(3.0),
    "through a row of an iteration": no_grad(lambda m: [row.add_(1.0) for row in m.layer.weight]),
    "data in a statement": lambda m: setattr(m.layer.weight, "data", m.layer.weight.data * 0.5),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        torch.arange(float(WIDTH * WIDTH + WIDTH)), m.layer.parameters()
    ),
    "foreach": no_grad(lambda m: torch._foreach_mul_(list(m.parameters()), 0.5)),
    "out": no_grad(lambda m: torch.add(m.layer.bias, 1.0, out=m.layer.bias)),
    "moving average": no_grad(lambda m: m.layer.weight.mul_(0.9).add_(m.layer.weight.detach(), alpha=0.3)),
    "clamp of data": lambda m: m.layer.weight.data.clamp_(-0.01, 0.01),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "new parameter": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "data of another shape": lambda m: setattr(m.layer.weight, "data", torch.ones(1)),
    "set_": no_grad(lambda m: m.layer.weight.set_(torch.ones(WIDTH, WIDTH))),
    "resize_": no_grad(lambda m: m.layer.weight.resize_(3)),
    "t_": no_grad(lambda m: m.gain.unsqueeze_(0)),
    "differs between ranks": no_grad(lambda m: m.layer.bias.add_(torch.distributed.get_rank())),
    "while autograd records": lambda m: m.layer.bias.add_(1.0),
    "half of a submodule": lambda m: m.layer.half(),
    "delete": lambda m: delattr(m.layer, "bias"),
    "add": lambda m: setattr(m, "extra", nn.Parameter(torch.ones(2))),
}


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("write", list(WRITES))
def test_writes_to_parameters_hold_on_all_ranks_and_in_later_steps(
    world: World, write: str, stage: int
) -> None:
    torch.manual_seed(world.seed)
    plain = Scalars()
    model, optimizer = prepared(world, copy.deepcopy(plain), stage)
    pairs = [(plain, adamw(plain.parameters())), (model, optimizer)]
    for step in range(3):
        for module, _ in pairs:
            torch.manual_seed(world.seed + step)
            WRITES[write](module)
        check_near(model, plain, 1e-6, 1e-7)
        for module, stepped in pairs:
            train_step(module, stepped, feature_loss(module, feature_batch(world.seed, step, 0, 0)))


@on_ranks(2)
@pytest.mark.parametrize("write", list(REFUSED))
def test_writes_that_cannot_hold_raise_and_change_nothing(world: World, write: str) -> None:
    model, _ = prepared(world, Scalars())
    before = zero_ext.full_state_dict(model)
    with pytest.raises((RuntimeError, AttributeError), match=r"gathered|prepare|no_grad"):
        REFUSED[write](model)
        feature_loss(model, feature_batch(world.seed, 0, 0, world.rank))
    if write not in ("new parameter", "delete", "add"):
        check_same(model, before)


@on_ranks(1, stand_in=True)
def test_writes_through_data_reach_the_shards_of_a_device(world: World) -> None:
    model, _ = prepared(world, Scalars().to("stand_in"), offload={"params": "host"})
    features = feature_batch(world.seed, 0, 0, world.rank).to("stand_in")
    feature_loss(model, features).backward()
    model.gain.data.fill_(2.0)
    model.layer.weight.data[0] = 3.0
    feature_loss(model, features).backward()
    state = zero_ext.full_state_dict(model)
    assert state["gain"].item() == 2.0 and bool((state["layer.weight"][0] == 3.0).all())


REFUSED_COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda m: pickle.dumps(m.module),
    "pickle of a parameter": lambda m: pickle.dumps(m.layer.weight),
    "torch.save of the model": lambda m: torch.save(m.module, io.BytesIO()),
    "torch.save of a parameter": lambda m: torch.save(m.layer.weight, io.BytesIO()),
    "torch.save of the state_dict": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "torch.save of the state_dict on rank 0": lambda m: torch.save(m.layer.state_dict(), io.BytesIO()),
    "safetensors": lambda m: safetensors.torch.save(m.state_dict()),
    "half": lambda m: m.half(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to meta": lambda m: m.to("meta"),
    "double of the module": lambda m: m.module.double(),
    "share_memory": lambda m: m.share_memory(),
    "share_memory_ of a parameter": lambda m: m.layer.weight.share_memory_(),
    "load_state_dict assign": lambda m: m.load_state_dict(Scalars().state_dict(), assign=True),
    "load_state_dict of the module, assign": lambda m: (
        m.module.load_state_dict(Scalars().state_dict(), assign=True),
        m(torch.zeros(2, WIDTH)),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", list(REFUSED_COPIES))
def test_copies_of_shards_raise_and_name_the_call(world: World, what: str) -> None:
    model, _ = prepared(world, Scalars())
    if world.rank == 0 or "on rank 0" not in what:
        with pytest.raises((RuntimeError, ValueError), match=r"full_state_dict|prepare|assign=False"):
            REFUSED_COPIES[what](model)
    if "of the module, assign" not in what:
        feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()


STATES: dict[str, Callable[[Any], Any]] = {
    "of the model": lambda m: m.state_dict(),
    "of the module": lambda m: (m.module if hasattr(m, "module") else m).state_dict(),
    "of a child": lambda m: {f"layer.{name}": value for name, value in m.layer.state_dict().items()},
    "with autograd": lambda m: m.state_dict(keep_vars=True),
    "deep copy": lambda m: copy.deepcopy(m.state_dict()),
    "clones": lambda m: {name: value.clone() for name, value in m.state_dict().items()},
    "another dtype": lambda m: {name: value.double() for name, value in m.state_dict().items()},
    "of a deep copy": lambda m: copy.deepcopy(m).state_dict(),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("what", list(STATES))
def test_state_dict_has_full_values(world: World, what: str, stage: int) -> None:
    torch.manual_seed(world.seed)
    plain = Scalars()
    model, optimizer = prepared(world, copy.deepcopy(plain), stage)
    retained, wanted = STATES[what](model), STATES[what](plain)
    assert list(retained) == list(wanted)
    for name, value in wanted.items():
        assert retained[name].dtype == value.dtype
        assert torch.equal(retained[name], value)
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()
    optimizer.step()
    # As in torch, what was not copied follows the model.
    state = zero_ext.full_state_dict(model)
    follows = what in ("of the model", "of the module", "of a child", "with autograd")
    assert torch.equal(retained["layer.bias"], state["layer.bias"]) == follows


LOADS: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    "model": lambda m, state: m.load_state_dict(state),
    "module": lambda m, state: m.module.load_state_dict(state),
    "not strict": lambda m, state: m.module.load_state_dict({**state, "other": torch.ones(1)}, strict=False),
    "children": lambda m, state: (
        m.layer.load_state_dict({name.removeprefix("layer."): state[name] for name in state if "." in name}),
        m.module.load_state_dict({name: state[name] for name in state if "." not in name}, strict=False),
    ),
    "own": lambda m, state: m.module.load_state_dict(
        {name: value * 0 + state[name] for name, value in m.module.state_dict().items()}
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", list(LOADS))
def test_load_state_dict_reaches_the_shards(world: World, what: str, stage: int) -> None:
    torch.manual_seed(world.seed)
    plain = Scalars()
    model, optimizer = prepared(world, Scalars(), stage)
    LOADS[what](model, plain.state_dict())
    check_same(model, plain)
    for net, stepping in ((model, optimizer), (plain, adamw(plain.parameters()))):
        train_step(net, stepping, feature_loss(net, feature_batch(world.seed, 0, 0, 0)))
    check_near(model, plain, 1e-6, 1e-7)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loaded_values_that_differ_between_ranks_are_refused_and_change_nothing(
    world: World, stage: int
) -> None:
    model, _ = prepared(world, Scalars(), stage)
    before = zero_ext.full_state_dict(model)
    other = {name: value + (world.rank if "bias" in name else 1) for name, value in before.items()}
    with pytest.raises(RuntimeError, match=r"'layer\.bias'.*same value on all ranks.*same file"):
        model.load_state_dict(other)
    check_same(model, before)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_data_retains_its_values(world: World, stage: int) -> None:
    """Moving averages are swapped in for an evaluation and back like this."""
    torch.manual_seed(world.seed)
    plain = Scalars()
    model, optimizer = prepared(world, copy.deepcopy(plain), stage)
    pairs, evaluated = [(plain, adamw(plain.parameters())), (model, optimizer)], []
    for step in range(2):
        for net, stepping in pairs:
            train_step(net, stepping, feature_loss(net, feature_batch(world.seed, step, 0, 0)))
            retained = {name: parameter.data for name, parameter in net.named_parameters()}
            for parameter in net.parameters():
                parameter.data = parameter.data * 0.5
            with torch.no_grad():
                evaluated.append(feature_loss(net, feature_batch(world.seed, 9, 0, 0)).item())
            for name, parameter in net.named_parameters():
                parameter.data = retained[name]
        assert evaluated[-1] == pytest.approx(evaluated[-2], rel=1e-5)
    check_near(model, plain)


COPIES: dict[str, Callable[[Any], Any]] = {
    "model": copy.deepcopy,
    "module": lambda m: copy.deepcopy(m.module),
    "in a dict": lambda m: copy.deepcopy({"net": m})["net"],
    "averaged": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    "inside gathered": lambda m: _copied_inside_gathered(m),
    "twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
}


def _copied_inside_gathered(model: Any) -> Any:
    with zero_ext.gathered(model):
        return copy.deepcopy(model)


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("what", list(COPIES))
def test_a_deep_copy_is_an_ordinary_model(world: World, what: str, tied: bool, stage: int) -> None:
    """It has the values of that moment, trains with a plain optimizer, and leaves the original alone."""
    torch.manual_seed(world.seed)
    plain = TinyModel(tied=tied)
    model, optimizer = prepared(world, copy.deepcopy(plain), stage)
    before = zero_ext.full_state_dict(model)
    twin = COPIES[what](model)
    assert type(twin) is TinyModel
    assert [type(p) for p in twin.parameters()] == [nn.Parameter] * len(list(plain.parameters()))
    with pytest.raises(ValueError, match="expected a prepared one"):
        engine_of(twin)
    batch = language_batch(world.seed, 0, 0, 0)
    nets = [(twin, adamw(twin.parameters())), (plain, adamw(plain.parameters()))]
    for _ in range(2):
        for net, stepping in nets:
            train_step(net, stepping, language_loss(net, batch))
    check_same(twin, plain)
    check_same(model, before)
    twin.share_memory()
    assert twin.double().norm.weight.dtype is torch.float64
    torch.save(twin.state_dict(), io.BytesIO())
    pickle.dumps(twin)
    train_step(model, optimizer, language_loss(model, batch))
    check_same(plain, twin.float())
    prepared(world, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_deep_copy_of_a_bf16_model_casts_its_inputs_and_pickles(world: World, stage: int) -> None:
    model, _ = prepared(world, Scalars(), stage, precision={"dtype": "bf16"})
    features = feature_batch(world.seed, 0, 0, 0)
    wanted = model(features)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert wanted.dtype == torch.bfloat16 and torch.equal(twin(features), wanted)


@on_ranks(2)
def test_parameters_copy_to_ordinary_ones(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = Scalars()
    model, _ = prepared(world, copy.deepcopy(plain))
    made = copy.deepcopy([*model.parameters(), model.layer.weight, model.layer.weight.detach()[1:]])
    for copied, wanted in zip(made[:-2], plain.parameters(), strict=True):
        assert type(copied) is nn.Parameter and copied.requires_grad and torch.equal(copied, wanted)
    assert made[-2] is made[2] and torch.equal(made[2], plain.layer.weight)
    assert type(made[-1]) is torch.Tensor and torch.equal(made[-1], plain.layer.weight[1:])


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicated_stages_save_true_values(world: World, stage: int) -> None:
    model, optimizer = prepared(world, Scalars(), stage)
    train_step(model, optimizer, feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    check_same(torch.load(buffer, weights_only=True), model)
    with pytest.raises(RuntimeError, match="prepare"):
        model.half()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_average_of_the_weights_by_hand(world: World, stage: int) -> None:
    """The usual EMA loop, inside ``gathered`` and outside."""
    model, _ = prepared(world, Scalars(), stage)
    average = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}

    def update() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.5)

    with zero_ext.gathered(model):
        update()
    state = zero_ext.full_state_dict(model)
    assert all(torch.equal(average[name], state[name] * 0.5) for name in average)
    update()
    assert all(torch.equal(average[name], (state[name] * 0.5).lerp(state[name], 0.5)) for name in average)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_direct_edits_of_replicated_parameters_reach_the_masters(world: World, stage: int) -> None:
    model, optimizer = prepared(world, Scalars(), stage, precision={"dtype": "bf16"})
    with torch.no_grad():
        model.layer.weight.fill_(0.5)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    train_step(model, optimizer, feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)))
    assert (zero_ext.full_state_dict(model)["layer.weight"] == 0.5).all()
    assert engine_of(model).steps == 1


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(1, 2)
def test_data_parallelism_of_torch_over_a_prepared_model_is_refused(
    world: World, stage: int, wrapped: bool
) -> None:
    model, _ = prepared(world, TinyModel(), stage)
    inner = model if wrapped else model.module
    with pytest.raises(RuntimeError, match="DistributedDataParallel: expected a model that is not prepared"):
        nn.parallel.DistributedDataParallel(inner, process_group=world.group)
    # A copy is an ordinary model again.
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(model.module), process_group=world.group)
    language_loss(plain, language_batch(world.seed, 0, 0, world.rank)).backward()
