"""Cuts into stages by DeepSpeed's methods, against DeepSpeed's own functions."""

from __future__ import annotations

import random
import secrets
from itertools import pairwise

import pytest
import torch
from torch import nn

from zero_ext.integrations.deepspeed.pipe import LayerSpec
from zero_ext.integrations.deepspeed.pipe.partition_methods import weights_by
from zero_ext.parallel import split_stages


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
    for layers in range(1, 14):
        for stages in range(1, layers + 1):
            assert bounds_of([1.0] * layers, stages) == utils.partition_uniform(layers, stages)
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
