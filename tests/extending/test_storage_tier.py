"""The storage tier that CONTRIBUTING describes, registered from outside the package and then trained in."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zero_ext
from tests.activation.blocks import WIDTH
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import Plan, adamw, check_equal, configuration, sgd
from tests.zero.training import train_in_tiers as train
from zero_ext.activation import ActivationCheckpointing
from zero_ext.config import ActivationCheckpointingConfig, ConfigError
from zero_ext.config.tiers import TIERS, StorageTier, register_tier
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.zero import engine_of

TOY = StorageTier("toy", "toy", "mapped pages", allocate=lambda nbytes: Pages.allocate(nbytes))
PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"optimizer": "toy"}),
    (2, {"optimizer": "toy", "grads": "host"}),
    (2, {"optimizer": "host", "grads": "toy", "ratio": 0.5}),
    (3, {"optimizer": "toy", "grads": "toy", "params": "toy"}),
    (3, {"optimizer": "toy", "params": "nvme"}),
    (3, {"optimizer": "nvme", "grads": "toy", "params": "toy"}),
    (3, {"optimizer": "toy", "grads": "toy", "update_mode": "in_backward"}),
    (3, {"optimizer": "toy", "params": "toy", "update_mode": "delayed"}),
]


class Pages:
    """Memory that the kernel maps page by page."""

    ends: ClassVar[dict[int, int]] = {}  # of every mapping, by its address

    @classmethod
    def allocate(cls, nbytes: int) -> torch.Tensor:
        """Return zeroed memory of ``nbytes``."""
        memory = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        cls.ends[memory.data_ptr()] = memory.data_ptr() + nbytes
        return memory

    @classmethod
    def holds(cls, values: torch.Tensor) -> bool:
        """Return whether ``values`` are in memory that was allocated here."""
        first = values.data_ptr()
        return any(begin <= first and first + values.nbytes <= end for begin, end in cls.ends.items())


@contextlib.contextmanager
def toy_tier() -> Iterator[None]:
    """Return a context in which configurations can name the toy."""
    register_tier(TOY)
    try:
        yield
    finally:
        del TIERS["toy"]


@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_in_the_tier_trains_as_in_host_memory(world: World, name: str) -> None:
    make = {"adamw": adamw, "sgd": sgd}[name]
    with toy_tier():
        for number, (stage, offload) in enumerate(PLACEMENTS):
            plan = Plan(micro_batches=1 + number % 2, clip=0.1, dtype=("fp32", "bf16")[number % 2])
            in_host = {key: "host" if tier == "toy" else tier for key, tier in offload.items()}
            check_equal(train(world, stage, plan, offload, make), train(world, stage, plan, in_host, make))


@on_ranks(1, 2)
def test_reports_count_the_tier_and_its_memory_holds_the_state(world: World) -> None:
    def breakdown(tier: str) -> tuple[Any, Any]:
        offload = {"optimizer": tier, "grads": tier}
        model, optimizer = zero_ext.prepare(
            (model := TinyModel()),
            adamw(model.parameters()),
            configuration(2, offload=offload),
            process_group=world.group,
        )
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        optimizer.step()
        return engine_of(model), engine_of(model).memory_by_tier()

    with toy_tier():
        (engine, found), (_, expected) = breakdown("toy"), breakdown("host")
        for master in engine.masters:
            assert all(map(Pages.holds, master.state.values.values()))
        for gradients in engine.reducer.gradients:
            assert Pages.holds(gradients.storage.shard().memory("host"))
        in_memory = {kind: nbytes + expected["host"][kind] for kind, nbytes in expected["device"].items()}
        assert engine.memory_breakdown() == in_memory
    moved = {kind: expected["host"][kind] for kind in ("optimizer", "grads")}
    assert moved["optimizer"] and moved["grads"]
    assert {kind: found["toy"][kind] for kind in moved} == moved
    assert found["device"] == expected["device"]
    assert found["host"] == expected["host"] | dict.fromkeys(moved, 0)


def test_configurations_and_plans_know_the_tier_while_it_is_registered() -> None:
    config = {"stage": 3, "offload": {"params": "toy", "optimizer": "toy"}}
    with pytest.raises(ConfigError, match=r"offload.params: expected 'device', 'host' or 'nvme', got 'toy'"):
        zero_ext.load_config(config)
    with toy_tier():
        loaded = zero_ext.load_config(config)
        assert loaded.offload.params == "toy" and loaded.to_mapping()["offload"]["params"] == "toy"
        run = Training.of_config(config, 2)
        assert (run.params, run.grads, run.optimizer) == ("host", "device", "host")
        for wrong, message in (
            ({"params": "tape"}, "offload.params: expected 'device', 'host', 'nvme' or 'toy', got 'tape'"),
            ({"params": "toy", "nvme_paths": ["/x"]}, "nvme_paths: .*nothing is stored on 'nvme'"),
            ({"ratio": 0.5}, "set optimizer to 'host', 'nvme' or 'toy'"),
        ):
            with pytest.raises(ConfigError, match=message):
                zero_ext.load_config({"stage": 3, "offload": wrong})
    for wrong_tier in (replace(TOY, name="host"), replace(TOY, memory=None), replace(TOY, allocate=None)):
        with pytest.raises(ValueError, match="tier: expected a new name, memory 'host' and a function"):
            register_tier(wrong_tier)
    assert "toy" not in TIERS


def test_activations_are_offloaded_to_the_tier() -> None:
    with toy_tier():
        checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(tier="toy"))
        block, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(64, WIDTH, requires_grad=True)
        checkpointing(block, inputs).square().sum().backward()
        found, inputs.grad = inputs.grad, None
        block(inputs).square().sum().backward()
        assert torch.equal(found, inputs.grad)  # type: ignore[arg-type]
        assert checkpointing.allocated_bytes()["toy"] >= inputs.nbytes
