"""Reference models that follow the policy, mixed on each rank's shards, are those that torch mixes whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.integrations.transformers.models import llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import adamw, placed
from zero_ext.integrations.transformers import reference_model
from zero_ext.zero import engine_of
from zero_ext.zero.units.unit import Unit


class Callback:
    """Stands in for TRL's."""

    def sync_target_model(self, *_: Any) -> None:
        raise AssertionError("writes to full parameters")


def sharded(world: World, model: Any, trained: bool, config: dict[str, Any]) -> Any:
    model.requires_grad_(trained)
    optimizer = adamw(model.parameters()) if trained else None
    zero_ext.prepare(model, optimizer, config, process_group=world.group, wrap=False)
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        (3, "fp32", "device"),
        (3, "bf16", "host"),
        (3, "bf16", "nvme"),
        (2, "bf16", "device"),
        (0, "fp32", "device"),
    ],
)
def test_shards_are_mixed(world: World, stage: int, dtype: str, offload: str) -> None:
    callback = Callback()
    with placed({"params": offload}) as section, mock.patch.object(reference_model, "_CHUNK_ELEMENTS", 1000):
        config = {"stage": stage, "precision": {"dtype": dtype}, "offload": section}
        policy = sharded(world, llama(world.seed), True, config)
        reference = sharded(world, llama(world.seed + 1), False, config)
        wanted = zero_ext.full_state_dict(reference)
        for name, value in zero_ext.full_state_dict(policy).items():
            wanted[name].mul_(0.75).add_(value, alpha=0.25)
        reference_model.mix_by_shards(policy, reference, [callback])
        with mock.patch.object(Unit, "to_fetching", side_effect=AssertionError("gathered")):
            callback.sync_target_model(policy, reference, 0.25)
        found = zero_ext.full_state_dict(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        plain, ids = llama(0).to(next(iter(wanted.values())).dtype), torch.arange(3, 11)[None]
        plain.load_state_dict(wanted)
        with torch.no_grad():
            torch.testing.assert_close(reference(ids).logits, plain(ids).logits, rtol=0.02, atol=1e-3)
        assert engine_of(reference).masters == ()


@on_ranks(2)
def test_a_reference_that_is_sharded_otherwise(world: World) -> None:
    policy = llama(world.seed)
    policy.model.layers[0].mlp.gate_proj.requires_grad_(False)
    config = {"stage": 3, "units": {"persistence_threshold": 0}}
    zero_ext.prepare(policy, adamw(policy.parameters()), config, process_group=world.group, wrap=False)
    reference = sharded(world, llama(world.seed), False, config)
    with pytest.raises(ValueError, match="sync_ref_model: expected a reference model with the units"):
        reference_model.mix_by_shards(policy, reference, [Callback()])
    reference_model.mix_by_shards(policy, reference, [])  # one that stays as it is
