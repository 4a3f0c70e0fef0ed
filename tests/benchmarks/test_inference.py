"""The benchmark of inference: the size of its capped model, its bound, and one run of a tiny model."""

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.generator import COMMANDS, Generator
from benchmarks.harness.shapes import LlamaShape, shape_named
from benchmarks.inference import BAR, Run, beyond, measure, table_of


def tiny() -> LlamaShape:
    shape = shape_named("tiny")
    assert isinstance(shape, LlamaShape)
    return shape


def test_the_capped_model_is_as_large_as_asked_and_hardly_larger() -> None:
    for cap in (10_000_000, 12_345_678):
        shape = beyond(cap, 5.0, tiny())
        layer = beyond(cap, 5.0, tiny()).parameters / shape.layers
        assert 5 * cap <= 2 * shape.parameters < 5 * cap + 3 * layer
        assert shape.hidden == tiny().hidden and str(shape.layers) in shape.name


def test_the_bound_is_the_slower_of_computing_and_reading_in_each_round() -> None:
    run = Run(tiny(), None, forward=[2.0, 4.5], compute=[1.0, 3.0], read=[2.0, 1.0])
    assert run.bound == [2.0, 3.0] and run.ratio().high == 1.5
    assert run.ratio().median > BAR and not run.met()
    run.forward = [2.0, 3.0]
    assert run.met()
    run.identical = False
    assert not run.met()


class InThisProcess:
    """Answers as a team of one would."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._generator = Generator()

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        assert command in COMMANDS
        return [json.loads(json.dumps(getattr(self._generator, command)(**arguments)))]


@contextlib.contextmanager
def in_this_process(*_: object) -> Iterator[tuple[InThisProcess, InThisProcess]]:
    yield InThisProcess("plain"), InThisProcess("stored")
    gc.collect()


def test_a_tiny_model_says_the_same_from_nvme_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.inference.teams", in_this_process)
    run = Run(tiny(), None)
    measure(run, rounds=1, tokens=2, threads=torch.get_num_threads(), folder=tmp_path)
    assert run.identical and run.parameter_bytes == 2 * tiny().parameters
    assert len(run.forward) == len(run.compute) == len(run.read) == 1 and min(run.bound) > 0
    assert run.peak_bytes > run.parameter_bytes
    assert not list(tmp_path.iterdir())
    assert "tiny" in table_of([run], 1, 2).markdown()
