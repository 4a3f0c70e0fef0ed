"""What a ``PipelineModule`` by DeepSpeed's name makes of its arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from tests.integrations.deepspeed.pipe.model import BLOCKS, Words, layers, scores
from tests.parallel.ranks.test_mesh import pretended
from zero_ext.integrations.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zero_ext.integrations.deepspeed.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError


def test_every_rank_finds_its_stage() -> None:
    data_first = ProcessTopology(["data", "pipe"], [2, 2])
    for rank in range(4):
        with pretended(rank, 4):
            counted = PipelineModule(layers(), num_stages=2)
            custom = PipelineModule(layers(), topology=data_first)
        assert (counted.stage_id, custom.stage_id) == (rank // 2, rank % 2)
        assert counted.topology().mapping == PipeDataParallelTopology(2, 2).mapping
        assert custom.topology() is data_first and custom.num_stages == custom.num_pipeline_stages() == 2
        for module in (counted, custom):
            held = [number for number in range(BLOCKS + 2) if module.stage_owner(number) == module.stage_id]
            assert [int(number) for number in module.layers] == held
            assert held == list(range(*module.partitions()[module.stage_id : module.stage_id + 2]))


def test_specifications_have_deepspeeds_attributes() -> None:
    plain = LayerSpec(nn.Linear, 4, out_features=5)
    tied = TiedLayerSpec("words", Words, forward_fn=scores, tied_weight_attr="bias")
    assert (plain.typename, plain.module_args, plain.module_kwargs) == (nn.Linear, (4,), {"out_features": 5})
    assert isinstance(tied, LayerSpec) and (tied.key, tied.forward_fn) == ("words", scores)
    assert tied.tied_weight_attr == ["bias"]
    assert plain.build(3).weight.shape == (5, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": None}, ValueError, "expected num_stages or topology"),
        (
            {"num_stages": 3},
            ValueError,
            "a product of 4, the number of ranks, got pp 3 × dp 1 × cp 1 × tp 1 = 3",
        ),
        (
            {"topology": PipeDataParallelTopology(4, 1)},
            ValueError,
            "expected num_stages 4 as in the topology",
        ),
        (
            {"num_stages": None, "topology": ProcessTopology(["pipe", "data", "model"], [2, 1, 2])},
            DeepSpeedFeatureError,
            "axes 'pipe' and 'data' are supported",
        ),
        ({"partition_method": "profile"}, ValueError, "partition_method: expected 'parameters'"),
        (
            {"partition_method": "type:Bloc$"},
            ValueError,
            "'type:Bloc$' matches none of the layers ['Block', 'Words']",
        ),
        (
            {"activation_checkpoint_interval": -1},
            ValueError,
            "activation_checkpoint_interval: expected a number of layers, got -1",
        ),
        (
            {"seed_layers": True},
            DeepSpeedFeatureError,
            "PipelineModule(seed_layers=...): it is not supported",
        ),
        ({"seed_fn": print}, DeepSpeedFeatureError, "leave it out"),
        ({"activation_checkpoint_func": print}, DeepSpeedFeatureError, "checkpointing.configure sets up"),
        ({"partition": "uniform"}, TypeError, "got 'partition'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pretended(0, 4), pytest.raises(error, match=re.escape(message)):
        PipelineModule(layers(), **{"num_stages": 2, **options})


def test_what_has_no_effect() -> None:
    from zero_ext.integrations.deepspeed.checkpointing import checkpoint

    with pretended(0, 4):
        PipelineModule(layers(), topology=PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2))
        module = PipelineModule(
            layers(),
            2,
            seed_layers=False,
            base_seed=7,
            dynamic_shape=True,
            activation_checkpoint_func=checkpoint,
        )
    with pytest.raises(ValueError, match="layer_idx: expected 0 to 5, got 6"):
        module.stage_owner(6)
    assert module.loss_fn is None and module.activation_checkpoint_interval == 0
