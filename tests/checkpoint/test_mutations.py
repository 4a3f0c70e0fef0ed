"""A thousand hostile files per run: each refused or read in 2 s and 4 times its size, with our own errors.

The seed changes with the day. ``ZERO_EXT_MUTATION_SEED=20260131`` repeats the run of one day.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, dense
from tests.checkpoint.mutations import mutate_bytes, mutated_text
from tests.integrations.deepspeed_checkpoint.forged import Forged
from zero_ext.checkpoint import CheckpointError, inspect_checkpoint, load_state, save_state
from zero_ext.checkpoint.format.manifest import checksum
from zero_ext.checkpoint.format.tensor_files import find_weights
from zero_ext.config import ConfigError, load_config, load_deepspeed_config
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import read_pickled

DAY = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d")
SEED = int(os.environ.get("ZERO_EXT_MUTATION_SEED", DAY))
ROUNDS = 200
SECONDS = 2.0
TIMES_THE_FILE = 4
BYTES_OF_THE_READER = 24 << 20  # its buffers and threads, whatever the file
# An error of Python's own in the text of ours: something was not checked.
UNCHECKED = re.compile(
    r"\b(RuntimeError|KeyError|IndexError|AttributeError|RecursionError|OverflowError|AssertionError|MemoryError"
    r"|Unicode\w+Error|ZeroDivisionError|UnboundLocalError|TypeError)\b"
)
TABLE = {
    **SMALL,
    "conv.weight": MIXED["conv.weight"],
    "factored.weight": MIXED["factored.weight"],
    "tied": dense(9, aliases=("alias",)),
}
CONFIGURATIONS = (
    {
        "stage": 3,
        "precision": {"dtype": "fp16"},
        "loss_scale": {"static": 0, "window": 100},
        "units": {"bucket_elements": 1000, "leaf_modules": ["Block"]},
        "offload": {"optimizer": "nvme", "params": "host", "nvme_paths": ["/tmp/a", "/tmp/b"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "monitor": {"output_dir": "logs", "wandb": {"mode": "offline"}},
    },
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "sparse_attention": {"mode": "fixed", "block": 16},
        "tensorboard": {"enabled": True, "output_path": "logs"},
    },
)
STATE = {"list": [1, 2.5, ("a", None)], "tensor": torch.arange(5), "bytes": b"\0\1", 7: {"inner": [True]}}


def memory(field: str) -> int:
    """A figure of this process in bytes."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def reset_peak() -> bool:
    """Makes VmHWM begin anew; False where the kernel has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def attack(
    file: Path,
    mutate: Callable[[random.Random], bytes],
    read: Callable[[], object],
    check: Callable[[BaseException], bool],
    wraps_errors: bool = False,
) -> None:
    """Writes mutations of `file` and reads them; `check` judges errors other than CheckpointError. With
    `wraps_errors` a CheckpointError may quote an error of Python's own, as that of torch's unpickler."""
    print("seed", SEED)
    refused = 0
    for number in range(ROUNDS):
        file.unlink(missing_ok=True)
        file.write_bytes(mutate(random.Random(f"{SEED} {file.name} {number}")))
        size = file.stat().st_size
        measured = reset_peak()
        before, start = memory("VmRSS"), time.process_time()
        try:
            read()
        except Exception as error:
            refused += 1
            own = isinstance(error, CheckpointError) or check(error)
            assert own, f"mutation {number}: {type(error)}: {error!s:.3000}"
            assert len(str(error).encode()) <= 2000, f"mutation {number}"
            assert wraps_errors or UNCHECKED.search(str(error)) is None, f"mutation {number}: {error}"
        seconds = time.process_time() - start
        assert seconds <= SECONDS, f"mutation {number}: {seconds} s"
        used = memory("VmHWM") - before if measured else 0
        limit = TIMES_THE_FILE * size + BYTES_OF_THE_READER
        assert used <= limit, f"mutation {number}: {used} bytes for a file of {size}"
    assert refused > ROUNDS // 4


def misfit(error: BaseException) -> bool:
    """Whether it is the ValueError of a checkpoint that does not fit the model."""
    return type(error) is ValueError and "Nothing of the model was changed" in str(error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_state(tmp_path / "run", FakeSource(TABLE, 1), client_state=STATE, extra={"loader": STATE})
    return tmp_path / "run" / "step-000001"


@pytest.mark.parametrize("signed", [True, False])
def test_manifests(folder: Path, signed: bool) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    fields = json.loads(data)
    del fields["manifest_crc32c"]
    text = json.dumps(fields)

    def mutate(generator: random.Random) -> bytes:
        if not signed:
            return mutate_bytes(data, generator)
        body = mutated_text(text, generator)
        if generator.random() < 0.3:
            body = mutate_bytes(body, generator)
        body = body.removesuffix(b"}")
        return body + b',\n"manifest_crc32c": "%08x"}\n' % checksum(body)

    def read() -> None:
        source = FakeSource(TABLE, 2)
        try:
            load_state(folder.parent, source)
        except Exception:
            assert source.holds(2)
            raise
        inspect_checkpoint(folder)

    attack(path, mutate, read, misfit)


def test_shards(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = path.read_bytes()
    attack(path, lambda generator: mutate_bytes(data, generator), lambda: _verified(folder), misfit)


def _verified(folder: Path) -> None:
    report = inspect_checkpoint(folder)
    if report.damage:
        raise CheckpointError(report.damage[0])
    load_state(folder.parent, FakeSource(TABLE, 2))


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.arange(7), "c": torch.ones((), dtype=torch.bfloat16)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table, content = data[8 : 8 + length].decode(), data[8 + length :]

    def mutate(generator: random.Random) -> bytes:
        if generator.random() < 0.4:
            return mutate_bytes(data, generator)
        text = mutated_text(table, generator)
        return len(text).to_bytes(8, "little") + text + content

    attack(path, mutate, lambda: find_weights(tmp_path), lambda error: False)


def test_indices_of_safetensors(tmp_path: Path) -> None:
    tables = {"one.safetensors": {"a": torch.ones(3)}, "two.safetensors": {"b": torch.arange(7)}}
    for name, table in tables.items():
        save_file(table, tmp_path / name)
    weight_map = {tensor: name for name, table in tables.items() for tensor in table}
    path = tmp_path / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"total_size": 68}, "weight_map": weight_map})

    def mutate(generator: random.Random) -> bytes:
        if generator.random() < 0.4:
            return mutate_bytes(text.encode(), generator)
        return mutated_text(text, generator)

    attack(path, mutate, lambda: find_weights(tmp_path), lambda error: False)


@pytest.mark.parametrize("load", [load_config, load_deepspeed_config])
def test_configurations(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(CONFIGURATIONS[load is load_deepspeed_config])
    path.write_text(text)
    load(path)

    def mutate(generator: random.Random) -> bytes:
        if generator.random() < 0.3:
            return mutate_bytes(text.encode(), generator)
        return mutated_text(text, generator)

    attack(path, mutate, lambda: load(path), lambda error: isinstance(error, ConfigError))


def test_pickles_of_deepspeed(tmp_path: Path) -> None:
    tag = Forged(2, 1, edit_model=lambda rank, state: state.update(mine=STATE)).write(tmp_path / "ds")
    path = tag / "mp_rank_00_model_states.pt"
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    out = tmp_path / "out"

    def mutate(generator: random.Random) -> bytes:
        if generator.random() < 0.3:
            return mutate_bytes(data, generator)
        with zipfile.ZipFile(tmp_path / "new.pt", "w") as archive:
            for name, content in records.items():
                pickled = name.endswith("data.pkl")
                archive.writestr(name, mutate_bytes(content, generator) if pickled else content)
        return (tmp_path / "new.pt").read_bytes()

    def read() -> None:
        read_pickled(path)
        shutil.rmtree(out, ignore_errors=True)
        import_deepspeed_checkpoint(tmp_path / "ds", out, optimizer="Adam", verify=False)

    def unstorable(error: BaseException) -> bool:
        return type(error) in (TypeError, ValueError) and str(error).startswith(("client_state", "extra"))

    attack(path, mutate, read, unstorable, wraps_errors=True)
