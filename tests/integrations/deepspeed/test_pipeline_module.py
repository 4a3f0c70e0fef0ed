"""What a ``PipelineModule`` by DeepSpeed's name makes of its arguments; cuts into stages, against DeepSpeed's
own functions; coordinates and ranks of a grid, against a table built by plain loops."""

from __future__ import annotations

import itertools
import random
import re
import secrets
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.deepspeed.pipeline_model import BLOCKS, Words, layers, scores
from tests.parallel.ranks.test_mesh import pretended
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.pipeline_module import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
    weights_by,
)
from zero_ext.parallel import split_stages


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


TWO_MODELS = ProcessTopology(["pipe", "data", "model"], [2, 1, 2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": None}, ValueError, "expected num_stages or topology"),
        (
            {"num_stages": 3},
            ValueError,
            "a product of 4, the number of ranks, got pp 3 × dp 1 × cp 1 × tp 1 = 3",
        ),
        ({"topology": PipeDataParallelTopology(4, 1)}, ValueError, "num_stages 4 as in the topology"),
        ({"num_stages": None, "topology": TWO_MODELS}, DeepSpeedFeatureError, "axes 'pipe' and 'data' are"),
        ({"partition_method": "profile"}, ValueError, "partition_method: expected 'parameters'"),
        ({"partition_method": "type:Bloc$"}, ValueError, "'type:Bloc$' matches none of the layers ['Block',"),
        (
            {"activation_checkpoint_interval": -1},
            ValueError,
            "checkpoint_interval: expected a number of layers, got",
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
    from zero_ext.integrations.deepspeed.deepspeed_checkpointing import checkpoint

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


def bounds_of(weights: list[float], stages: int) -> list[int]:
    return [0, *(held.stop for held in split_stages(weights, stages))]


def sums(weights: list[float], cuts: list[int]) -> list[float]:
    return [sum(weights[begin:end]) for begin, end in pairwise(cuts)]


def test_weights_of_layers() -> None:
    frozen = nn.Linear(2, 3)
    frozen.weight.requires_grad_(False)
    listed = [LayerSpec(nn.Embedding, 5, 4), torch.tanh, frozen, LayerSpec(nn.Linear, 4, 4), lambda x: x]
    assert weights_by("uniform", listed) == [1] * 5
    assert weights_by("Parameters", listed) == [20, 0, 3, 20, 0]
    assert weights_by("type:linear", listed) == [0, 0, 1, 1, 0]
    assert weights_by("TYPE:^(Emb|tanh$)", listed) == [1, 1, 0, 0, 0]
    for wrong in ("type", "type:", "best"):
        with pytest.raises(ValueError, match=f"partition_method: expected .* got '{wrong}'"):
            weights_by(wrong, listed)


def test_cuts_are_deepspeeds_or_better() -> None:
    utils = pytest.importorskip("deepspeed.runtime.utils")
    for count in range(1, 14):
        for stages in range(1, count + 1):
            assert bounds_of([1.0] * count, stages) == utils.partition_uniform(count, stages)
    # A transformer by parameters: an embedding, blocks, a norm and a head.
    for blocks, stages in ((4, 2), (8, 4), (12, 3), (6, 6)):
        heavy = [100.0, *[1000.0] * blocks, 1.0, 100.0]
        assert sums(heavy, bounds_of(heavy, stages)) == sums(heavy, utils.partition_balanced(heavy, stages))
    seed = secrets.randbits(31)
    generator = random.Random(seed)
    for _ in range(100):
        types = [float(generator.random() < 0.6) for _ in range(generator.randint(2, 14))]
        stages = generator.randint(1, len(types))
        assert bounds_of(types, stages) == utils.partition_balanced(types, stages), (seed, types)
        weights = [float(generator.randint(0, 50)) for _ in range(generator.randint(2, 12))]
        stages = generator.randint(1, len(weights))
        theirs = [int(cut) for cut in utils.partition_balanced(weights, stages)]
        assert max(sums(weights, bounds_of(weights, stages))) <= max(sums(weights, theirs)), (seed, weights)


def grid(dims: list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(length) for length in dims)))


def test_every_question_on_random_grids() -> None:
    seed = secrets.randbits(31)
    generator = random.Random(seed)
    for _ in range(30):
        axes = generator.sample(["pipe", "data", "model", "slice", "x"], generator.randint(1, 4))
        dims = [generator.randint(1, 4) for _ in axes]
        topology, table = ProcessTopology(axes, dims), grid(dims)
        assert topology.world_size() == len(table), seed
        for rank, at in enumerate(table):
            coord = dict(zip(axes, at, strict=True))
            assert topology.get_rank(**coord) == rank, seed
            assert topology.get_coord(rank)._asdict() == coord, seed
        for dim, axis in enumerate(axes):
            assert topology.get_dim(axis) == dims[dim]
            for index in range(dims[dim]):
                wanted = [rank for rank, at in enumerate(table) if at[dim] == index]
                assert topology.get_axis_list(axis, index) == wanted, seed
            lists = topology.get_axis_comm_lists(axis)
            assert sorted(itertools.chain(*lists)) == list(range(len(table))), seed
            for line in lists:
                rest = {tuple(v for i, v in enumerate(table[rank]) if i != dim) for rank in line}
                assert len(rest) == 1 and [table[rank][dim] for rank in line] == list(range(dims[dim])), seed
        some = generator.sample(axes, generator.randint(0, len(axes)))
        match = {axis: generator.randrange(dims[axes.index(axis)]) for axis in some}
        wanted = [
            rank for rank, at in enumerate(table) if all(at[axes.index(a)] == v for a, v in match.items())
        ]
        assert topology.filter_match(**match) == wanted, seed


def test_known_grids() -> None:
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_names() == ["pipe", "data", "model"]
    assert three.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert three.filter_match(pipe=0, data=1) == [2, 3]
    assert three.get_rank_repr(7) == "model_01"
    assert three.get_rank_repr(7, omit_axes=["model"], inner_sep=":", outer_sep="/") == "pipe:01/data:01"
    assert (three.get_dim("slice"), three.get_axis_comm_lists("slice")) == (0, [])
    two = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert two.mapping[two.ProcessCoord(pipe=1, data=2)] == 5
    assert two.get_rank(pipe=1, data=0) == 3


def test_bad_input() -> None:
    topology = ProcessTopology(["a", "b"], [2, 3])
    for wrong in ({"a": 1}, {"a": 1, "b": 0, "c": 0}):
        with pytest.raises(ValueError, match="Use filter_match for fewer"):
            topology.get_rank(**wrong)
    with pytest.raises(ValueError, match="axis 'b': expected a position of 0 to 2, got 3"):
        topology.get_rank(a=0, b=3)
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank: expected 0 to 5, got {rank}"):
            topology.get_coord(rank)
    with pytest.raises(ValueError, match=r"axis: expected one of \['a', 'b'\], got 'c'"):
        topology.filter_match(c=0)
    for axes, dims in ((["a"], [1, 2]), (["a", "a"], [1, 2]), (["a"], [0])):
        with pytest.raises(ValueError, match="each with a length"):
            ProcessTopology(axes, dims)
