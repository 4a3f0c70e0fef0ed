"""The small parts, each against an independent reference."""

from __future__ import annotations

import errno
import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes

from zero_ext.checkpoint.files import CheckpointError, Filesystem
from zero_ext.checkpoint.format.directory import CheckpointDirectory, step_name
from zero_ext.checkpoint.format.json_state import decode, encode
from zero_ext.checkpoint.format.tensor_files import (
    SAFETENSORS_CODES,
    TensorEntry,
    dtype_name,
    dtype_named,
    encode_header,
    is_logical_order,
    memory_order,
    to_logical_order,
)
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.shard_file import StreamWriter

SHAPES = st.lists(st.integers(0, 4), max_size=5)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_memory_order_of_any_permuted_tensor(case: tuple[list[int], list[int]]) -> None:
    shape, permutation = case
    logical = torch.arange(math.prod(shape)).reshape(shape)
    back = [permutation.index(dim) for dim in range(len(shape))]
    stored = logical.permute(permutation).contiguous().permute(back)
    flat = torch.as_strided(stored, (stored.numel(),), (1,))
    assert torch.equal(to_logical_order(flat, stored.shape, stored.stride()), logical)
    in_order = torch.equal(flat, logical.reshape(-1))
    assert is_logical_order(stored.shape, stored.stride()) == in_order or math.prod(shape) <= 1


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 3), (1, 1)), ((2, 3), (4, 1)), ((2, 3), (0, 1)), ((2,), (-1,)), ((2, 3), (3,)), ((4,), (2,))],
)
def test_layouts_with_holes_or_overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="stride"):
        memory_order(shape, stride)


def test_dtype_names() -> None:
    for dtype in SAFETENSORS_CODES:
        assert dtype_named(dtype_name(dtype)) is dtype
    for bad in ("torch.float32", "complex64", "", "__class__"):
        with pytest.raises(ValueError, match=r"dtype: expected one of .*, got"):
            dtype_named(bad)
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(list(SAFETENSORS_CODES)), SHAPES), max_size=6),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_the_safetensors_library_reads_any_header(
    tensors: list[tuple[torch.dtype, list[int]]], metadata: dict[str, str]
) -> None:
    entries = [TensorEntry(f"t{n}", dtype, tuple(shape)) for n, (dtype, shape) in enumerate(tensors)]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    header = encode_header(entries, metadata)
    assert len(header) % 64 == 0
    found = load_bytes(header + bytes(sum(entry.nbytes for entry in entries)))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        entry.key: (entry.dtype, entry.shape) for entry in entries
    }
    with pytest.raises(SafetensorError):
        load_bytes(header + bytes(sum(entry.nbytes for entry in entries) + 1))


def test_a_header_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="'a': it occurs twice"):
        encode_header([TensorEntry("a", torch.float32, (1,))] * 2, {})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_state_survives_json(value: object) -> None:
    text = json.dumps(encode(value, "state"), allow_nan=False)
    assert repr(decode(json.loads(text), "state")) == repr(value)


def test_short_and_interrupted_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    generator, write = random.Random(seed), os.write

    def short_write(descriptor: int, data: memoryview) -> int:
        return write(descriptor, data[: generator.randint(1, len(data))])

    filesystem = Filesystem()
    filesystem.block_bytes = 1 << 14
    data = torch.frombuffer(bytearray(generator.randbytes(100_003)), dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short_write)
        with StreamWriter(filesystem, tmp_path / "file") as writer:
            for chunk in data.split(generator.randint(1, 40_000)):
                writer.append(chunk)
            writer.finish()
    assert (tmp_path / "file").read_bytes() == bytes(data.tolist())


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct files here")
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", without_direct)
    Filesystem().write_file(tmp_path / "file", b"x" * 10_000)
    assert (tmp_path / "file").read_bytes() == b"x" * 10_000


def test_a_write_that_moves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(OSError, match="no more bytes"):
        Filesystem().write_file(tmp_path / "file", b"x")


def test_step_names() -> None:
    assert [step_name(step) for step in (0, 123, 10**7)] == ["step-000000", "step-000123", "step-10000000"]


def test_a_replaced_step_is_found_where_a_crash_left_it(tmp_path: Path) -> None:
    root = CheckpointDirectory(tmp_path)
    (tmp_path / ".replaced-step-000007").mkdir()
    (tmp_path / "latest").write_text("step-000007\n")
    assert root.resolve(None) == 7
    assert root.committed(7) == tmp_path / ".replaced-step-000007"
    root.clean(Filesystem())
    assert root.committed(7) == tmp_path / "step-000007"
    assert (tmp_path / "step-000007").is_dir()


def test_a_consensus_of_one_raises_the_same_error_type() -> None:
    consensus = RankConsensus(0, 1, None, "testing")
    assert consensus.stage(lambda: {"a": [1]}) == [{"a": [1]}]
    assert consensus.collect(b"abc") == [b"abc"]
    for raised, seen in ((ValueError, ValueError), (TypeError, TypeError), (OSError, CheckpointError)):

        def fail(kind: type[Exception] = raised) -> None:
            raise kind("reason")

        with pytest.raises(seen, match=r"testing failed: rank 0: .*reason\. Advice") as caught:
            consensus.stage(fail, "Advice")
        assert isinstance(caught.value.__cause__, raised)
    with pytest.raises(TypeError, match="not JSON serializable"):
        consensus.stage(lambda: object())
