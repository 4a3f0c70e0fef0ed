"""Pickles of a few KB that would take any amount of memory or time: refused in time linear in the file."""

from __future__ import annotations

import pickle
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum as DeepSpeedStages
from torch._tensor import _rebuild_from_type_v2

from tests.integrations.deepspeed_checkpoint.forged import (
    Forged,
    LossScaler,
    ZeroStageEnum,
    deepspeed_modules,
)
from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import (
    check_expanded,
    check_opcodes,
    read_pickled,
)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 5


def doubled(levels: int, make: Callable[[list[Any]], Any] = list) -> Any:
    """A value that as a tree has 2**levels leaves."""
    value: Any = make(["text"])
    for _ in range(levels):
        value = make([value, value])
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


LARGE = [number * (2**61 - 1) for number in range(1 << 60, (1 << 60) + 5000)]
ONE = torch.ones(1000)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lists": (lambda: doubled(60), "it repeats its parts"),
    "tuples": (lambda: doubled(60, tuple), "it repeats its parts"),
    "dicts": (lambda: doubled(60, lambda items: dict(enumerate(items))), "it repeats its parts"),
    "one text": (lambda: ["text" * 500] * 10_000, "it repeats its parts"),
    "one tensor": (lambda: [ONE] * 10_000, "bytes of tensors, more than 32 times"),
    "one element seen often": (lambda: ONE[:1].expand(1 << 40), "bytes of tensors, more than 32 times"),
    "a tuple as key": (lambda: {doubled(8, tuple): 1}, "a tuple that is a key expands to"),
    "a tuple in a set": (lambda: Call(set, [doubled(12, tuple)]), "it makes sets, and a tuple"),
    "numbers of one hash": (lambda: dict.fromkeys(LARGE), "more than 1000 numbers of more than 64 bits"),
    "itself": (itself, "it contains itself"),
    "levels": (lambda: nested(150), "nested deeper than 100 levels"),
    "an allocation": (lambda: Call(bytearray, 1 << 20), "it calls 'builtins.bytearray'"),
    "a tensor's class": (lambda: Call(torch.FloatTensor, 1 << 10), "it calls 'torch.FloatTensor'"),
    "an allocation behind a call": (
        lambda: Call(_rebuild_from_type_v2, bytearray, bytearray, (1 << 20,), {}),
        "_rebuild_from_type_v2 of something else",
    ),
    "a slow codec": (lambda: Call(__import__("_codecs").encode, "x", "punycode"), "another encoding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_small_file_that_expands_is_refused(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    tag = Forged(2, 1, edit_model=lambda rank, state: state.update(mine=make())).write(tmp_path / "ds")
    assert (tag / "mp_rank_00_model_states.pt").stat().st_size < 250_000
    with pytest.raises(CheckpointError, match=f"mp_rank_00_model_states.pt: refused: .*{message}"):
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out", optimizer="Adam", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", range(4))
def test_members_of_enums_by_name(tmp_path: Path, stage: int) -> None:
    """As early releases of Python 3.11 write them."""
    name = DeepSpeedStages(stage).name
    with deepspeed_modules():
        torch.save({"zero_stage": Call(getattr, ZeroStageEnum, name)}, tmp_path / "states.pt")
    assert read_pickled(tmp_path / "states.pt") == {"zero_stage": stage}


@pytest.mark.parametrize(
    "arguments", [(ZeroStageEnum, "mro"), (LossScaler, "weights"), (torch.Size, "numel")]
)
def test_attributes_of_classes_are_refused(tmp_path: Path, arguments: tuple[type, str]) -> None:
    with deepspeed_modules():
        torch.save({"zero_stage": Call(getattr, *arguments)}, tmp_path / "states.pt")
    with pytest.raises(
        CheckpointError, match=r"states.pt: refused: .*getattr for something else than a stage"
    ):
        read_pickled(tmp_path / "states.pt")


def test_a_compressed_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("states/data.pkl", pickle.dumps({"text": "x" * (64 << 20)}, 2))
        archive.writestr("states/version", "3\n")
    assert path.stat().st_size < 200_000
    with pytest.raises(CheckpointError, match=r"states.pt: .*'states/data.pkl' is compressed"):
        read_pickled(path)


def test_what_checkpoints_share_is_read(tmp_path: Path) -> None:
    names = [f"layers.{number}.attention.weight" for number in range(50)]
    shared = torch.ones(10, 10)
    marked = torch.ones(3)
    marked.mark = "of DeepSpeed's"
    value = {
        "marked": marked,
        "module": dict.fromkeys(names, shared),
        "names": names * 4,
        "shapes": [{name: torch.Size((10, 10)) for name in names}],
        "tuple": {(1, "two", (3.0, None)): b"bytes"},
        "large": 1 << 127,
    }
    torch.save(value, tmp_path / "states.pt")
    found = read_pickled(tmp_path / "states.pt")
    assert torch.equal(found["module"][names[7]], shared)
    assert torch.equal(found["marked"], marked)
    for key in ("names", "shapes", "tuple", "large"):
        assert found[key] == value[key]


def test_opcodes_of_other_writers_are_refused() -> None:
    check_opcodes(pickle.dumps({"a": [1, 2.5, ("b", None, True)]}, 2))
    with pytest.raises(ValueError, match=r"has the opcode FRAME, which torch\.save does not write"):
        check_opcodes(pickle.dumps(["a"], 4))
    with pytest.raises(ValueError, match="empty stack or memo"):
        check_opcodes(b"\x80\x02h\x07.")


def test_the_limit_follows_the_file() -> None:
    value = ["x" * 1000] * 4000
    check_expanded(value, 1 << 18, 0)
    with pytest.raises(ValueError, match=r"as a tree it takes 40\d+ bytes"):
        check_expanded(value, 1 << 10, 0)
