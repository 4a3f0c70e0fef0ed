"""aio ops: tensors to files and back through every backend, faults, life and end of engines."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from errno import EINTR, EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_ext import ops

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
HANDLES = itertools.count(1000)


@pytest.fixture(params=[name for name, reason in ops.aio_backends().items() if not reason])
def engine(request: pytest.FixtureRequest) -> Iterator[int]:
    """An open engine with small blocks, once for every backend of this machine."""
    handle = next(HANDLES)
    assert ops.aio_open(handle, request.param, 4, 8192, 2) == request.param
    yield handle
    ops.aio_close(handle)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_tensors_of_any_dtype_offset_and_alignment_are_read_back(engine: int, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    model = bytearray()
    path = str(tmp_path / "file")
    written = []
    for ticket in range(20):
        dtype = numbers.choice(DTYPES)
        values = torch.randint(0, 2, (numbers.randrange(1, 20_000),)).to(dtype)
        if dtype != torch.bool:
            values = values * numbers.randrange(1, 100)
        offset = len(model) if numbers.random() < 0.7 else (len(model) + 4095) // 4096 * 4096
        model += bytes(offset - len(model)) + values.view(torch.uint8).numpy().tobytes()
        ops.aio_write_(engine, ticket, path, offset, values)
        written.append((offset, values))
    for ticket in range(20):
        ops.aio_wait(engine, ticket)
    assert Path(path).read_bytes() == bytes(model)
    read = [torch.empty_like(values) for _, values in written]
    for (offset, _), target in zip(written, read, strict=True):
        target.view(torch.uint8).fill_(1)
        ops.aio_read_(engine, 7, path, offset, target)
    ops.aio_wait(engine, 7)
    for (_, values), target in zip(written, read, strict=True):
        assert torch.equal(values, target)


def test_a_created_file_is_private_and_tensors_outlive_their_names(engine: int, tmp_path: Path) -> None:
    path = tmp_path / "private"
    ops.aio_write_(engine, 1, str(path), 4096, torch.full((1 << 20,), 7, dtype=torch.uint8))
    ops.aio_wait(engine, 1)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.read_bytes() == bytes(4096) + b"\7" * (1 << 20)


def test_a_file_that_was_replaced_is_opened_again(engine: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"a" * 100, b"b" * 100):
        path.write_bytes(content)
        target = torch.zeros(100, dtype=torch.uint8)
        ops.aio_read_(engine, 1, str(path), 0, target)
        ops.aio_wait(engine, 1)
        assert target.numpy().tobytes() == content
        path.unlink()


def test_more_files_than_stay_open(engine: int, tmp_path: Path) -> None:
    before = open_descriptors()
    for number in range(80):
        ops.aio_write_(engine, 1, str(tmp_path / str(number)), 0, torch.tensor(number))
    ops.aio_wait(engine, 1)
    assert open_descriptors() - before <= 2 * 64
    for number in range(80):
        target = torch.tensor(-1)
        ops.aio_read_(engine, 1, str(tmp_path / str(number)), 0, target)
        ops.aio_wait(engine, 1)
        assert target == number


@pytest.mark.parametrize("error", [EIO, ENOSPC])
@pytest.mark.parametrize("writing", [False, True])
def test_an_injected_error_names_position_and_reason(
    engine: int, tmp_path: Path, error: int, writing: bool
) -> None:
    path = str(tmp_path / "file")
    tensor = torch.ones(10 * 8192, dtype=torch.uint8)
    transfer = ops.aio_write_ if writing else ops.aio_read_
    ops.aio_write_(engine, 1, path, 0, tensor)
    ops.aio_wait(engine, 1)
    ops.aio_inject_fault(engine, writing, 3, -error)
    transfer(engine, 1, path, 0, tensor)
    action = "writing" if writing else "reading"
    expected = (
        rf"{action} 8192 bytes at offset \d+ of '{path}' failed: {os.strerror(error)} \(errno {error}\)"
    )
    with pytest.raises(RuntimeError, match=expected):
        ops.aio_wait(engine, 1)
    ops.aio_wait(engine, 1)
    transfer(engine, 1, path, 0, tensor)
    ops.aio_wait(engine, 1)


def test_interruptions_and_short_transfers_are_overcome(engine: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    tensor = torch.randint(0, 256, (100_001,), dtype=torch.uint8)
    for result in (-EINTR, 1, 4096):
        ops.aio_inject_fault(engine, True, 1, result, 3)
        ops.aio_write_(engine, 1, str(path), 0, tensor)
        ops.aio_wait(engine, 1)
        assert path.read_bytes() == tensor.numpy().tobytes()
        target = torch.zeros_like(tensor)
        ops.aio_inject_fault(engine, False, 1, result, 3)
        ops.aio_read_(engine, 1, str(path), 0, target)
        ops.aio_wait(engine, 1)
        assert torch.equal(target, tensor)
        path.unlink()


def test_one_failed_transfer_of_a_ticket_fails_it_after_all_have_ended(engine: int, tmp_path: Path) -> None:
    tensors = [torch.full((50_000,), number, dtype=torch.uint8) for number in range(4)]
    ops.aio_inject_fault(engine, False, 0, 0)
    (tmp_path / "0").write_bytes(bytes(50_000))
    ops.aio_read_(engine, 5, str(tmp_path / "0"), 0, tensors[0])
    for number in range(1, 4):
        ops.aio_write_(engine, 5, str(tmp_path / str(number)), 0, tensors[number])
    with pytest.raises(RuntimeError, match=r"reading .* failed: the file ends \(it has 50000 bytes\)"):
        ops.aio_wait(engine, 5)
    for number in range(1, 4):
        assert (tmp_path / str(number)).read_bytes() == bytes([number]) * 50_000


def test_a_read_past_the_end_is_an_error(engine: int, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(10_000))
    ops.aio_read_(engine, 1, str(path), 4096, torch.empty(10_000, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"the file ends \(it has 10000 bytes\)"):
        ops.aio_wait(engine, 1)


def test_a_full_file_system_is_an_error(engine: int, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        ops.aio_write_(engine, 1, str(tmp_path / "big"), 0, torch.zeros(100_000))
        with pytest.raises(RuntimeError, match=r"writing .*big' failed: File too large \(errno 27\)"):
            ops.aio_wait(engine, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_bad_arguments_are_named(engine: int, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    for wrong, message in (
        ({"backend": "posix"}, "backend: expected 'auto', 'io_uring', 'libaio' or 'threads', got 'posix'"),
        ({"queue_depth": 0}, "queue_depth: expected 1 to 1024, got 0"),
        ({"queue_depth": 2**40}, "queue_depth: expected 1 to 1024, got 1099511627776"),
        ({"block_bytes": 1000}, "block_bytes: expected 4096 to 1073741824, got 1000"),
        ({"io_threads": 17}, "io_threads: expected 1 to 16, got 17"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.aio_open(next(HANDLES), **wrong)
    with pytest.raises(RuntimeError, match="handle -1 is not open"):
        ops.aio_read_(-1, 1, path, 0, torch.zeros(1))
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.aio_write_(engine, 1, path, 0, torch.zeros(4, 4).t())
    with pytest.raises(RuntimeError, match=r"opening .*file': No such file"):
        ops.aio_read_(engine, 1, path, 0, torch.zeros(1))
    with pytest.raises(RuntimeError, match="regular file or a block device"):
        ops.aio_read_(engine, 1, str(tmp_path), 0, torch.zeros(1))
    with pytest.raises(RuntimeError, match="no file reaches there"):
        ops.aio_write_(engine, 1, path, -8, torch.zeros(1))


def test_closing_waits_for_transfers_in_flight(tmp_path: Path) -> None:
    handle = next(HANDLES)
    ops.aio_open(handle, block_bytes=4096, queue_depth=1)
    tensor = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8)
    ops.aio_write_(handle, 1, str(tmp_path / "file"), 0, tensor)
    ops.aio_close(handle)
    assert (tmp_path / "file").read_bytes() == tensor.numpy().tobytes()
    with pytest.raises(RuntimeError, match=f"handle {handle} is not open"):
        ops.aio_wait(handle, 1)


# Ends with open engines, after a forked child did, which first forbids itself io_uring as sandboxes do: a
# filter of system calls answers EPERM to the one of that number.
ENGINES_LEFT_OPEN = """
import ctypes, json, os, struct, sys, torch
from zero_ext import ops

def forbid(number):
    rules = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
        raise OSError("no filter")

def refusal(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]

folder = sys.argv[1]
ones = torch.ones(1_000_000, dtype=torch.uint8)
for handle, (backend, reason) in enumerate(ops.aio_backends().items()):
    if not reason:
        ops.aio_open(handle, backend, 1, 4096)
        ops.aio_write_(handle, 1, folder + "/" + backend, 0, ones)
if os.fork() == 0:
    told = refusal(ops.aio_wait, 2, 1)
    forbid(425)
    chosen = ops.aio_open(2)
    ops.aio_write_(2, 1, folder + "/child", 0, ones)
    print(json.dumps([told, ops.aio_backends(), chosen, refusal(ops.aio_open, 1, "io_uring")]))
    sys.exit(5)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def left_open(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder that engines wrote to until their processes ended, and what the forked child saw."""
    folder = tmp_path_factory.mktemp("left_open")
    command = [sys.executable, "-c", ENGINES_LEFT_OPEN, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (5, "")
    return folder, json.loads(result.stdout)


def test_exit_with_open_engines_completes_their_writes(left_open: tuple[Path, list[Any]]) -> None:
    available = {name for name, reason in ops.aio_backends().items() if not reason}
    assert {file.name for file in left_open[0].iterdir()} == available | {"child"}
    for file in left_open[0].iterdir():
        assert file.read_bytes() == b"\1" * 1_000_000


def test_a_forked_child_reports_that_engines_are_not_inherited(left_open: tuple[Path, list[Any]]) -> None:
    assert left_open[1][0].partition("aio: ")[2].startswith("handle 2 is not open in this process")


def test_auto_selects_the_next_backend_where_io_uring_is_forbidden(left_open: tuple[Path, list[Any]]) -> None:
    _, backends, chosen, refusal = left_open[1]
    reason = backends.pop("io_uring")
    assert reason.startswith("forbidden, probably by a seccomp filter")
    others = ops.aio_backends()
    others.pop("io_uring")
    assert backends == others
    assert chosen == next(name for name, reason in others.items() if not reason)
    assert refusal.startswith(f"I/O backend io_uring: it is not available ({reason})")
