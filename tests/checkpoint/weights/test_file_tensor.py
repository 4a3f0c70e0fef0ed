"""Tensors of files that are rearranged without values: what is read is what torch makes of the values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zero_ext.checkpoint.chunk_reader import ChunkReader, ChunkRequest
from zero_ext.checkpoint.format.tensor_files import WeightFiles, find_weights
from zero_ext.checkpoint.weights import block_map, block_reads
from zero_ext.checkpoint.weights.block_map import BlockMap, UnsupportedConversion
from zero_ext.checkpoint.weights.block_reads import plan_reads
from zero_ext.checkpoint.weights.file_tensor import FileTensor

EXPERTS, ROWS, COLUMNS = 3, 4, 6


def interleaved(tensor: torch.Tensor, dim: int, shape: tuple[int, int]) -> torch.Tensor:
    """As transformers' ``Interleave``."""
    cut = (*tensor.shape[:dim], *shape, *tensor.shape[dim + 1 :])
    return tensor.reshape(cut).transpose(dim, dim + 1).reshape(tensor.shape).contiguous()


def stacked_and_joined(gates: list[torch.Tensor], ups: list[torch.Tensor]) -> torch.Tensor:
    """As transformers loads the experts of most families."""
    return torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)


# From EXPERTS matrices [ROWS, COLUMNS], twice, and a tensor [EXPERTS, ROWS, COLUMNS].
REARRANGED: dict[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "unchanged": lambda gates, ups, fused: fused,
    "stacked": lambda gates, ups, fused: torch.stack(gates),
    "stacked inside": lambda gates, ups, fused: torch.stack(gates, dim=-1),
    "experts": lambda gates, ups, fused: stacked_and_joined(gates, ups),
    "joined columns": lambda gates, ups, fused: torch.cat([gates[0], ups[1]], dim=1),
    "joined rows": lambda gates, ups, fused: torch.cat([gates[0], ups[1], gates[2]]),
    "transposed": lambda gates, ups, fused: gates[1].t().contiguous(),
    "fused transposed": lambda gates, ups, fused: torch.transpose(fused, 1, 2).contiguous(),
    "experts transposed": lambda gates, ups, fused: (
        stacked_and_joined(gates, ups).transpose(1, 2).contiguous()
    ),
    "joined, and each transposed": lambda gates, ups, fused: stacked_and_joined(
        [each.T.contiguous() for each in gates], [each.T.contiguous() for each in ups]
    ),
    "permuted": lambda gates, ups, fused: fused.permute(2, 0, 1).contiguous(),
    "rows from odd and even": lambda gates, ups, fused: interleaved(fused, 1, (ROWS // 2, 2)),
    "odd and even rows": lambda gates, ups, fused: interleaved(fused, 1, (2, ROWS // 2)),
    "odd and even columns": lambda gates, ups, fused: interleaved(fused, 2, (2, COLUMNS // 2)),
    "half of the rows": lambda gates, ups, fused: torch.chunk(fused, 2, dim=1)[1].contiguous(),
    "some columns": lambda gates, ups, fused: torch.split(fused, [1, 3, 2], dim=-1)[1].contiguous(),
    "one expert": lambda gates, ups, fused: torch.unbind(fused, dim=0)[-1],
    "rows of one index": lambda gates, ups, fused: fused[:, 2],
    "a slice": lambda gates, ups, fused: fused[1:, :-1, 2:].contiguous(),
    "one row": lambda gates, ups, fused: gates[0][:1].squeeze(0),
    "another dimension": lambda gates, ups, fused: gates[0].unsqueeze(1),
    "flat": lambda gates, ups, fused: fused.transpose(0, 1).reshape(-1),
    "regrouped": lambda gates, ups, fused: fused.transpose(0, 2).reshape(2, COLUMNS * ROWS * EXPERTS // 2),
    "rope": lambda gates, ups, fused: gates[0].view(2, 1, 2, COLUMNS).transpose(1, 2).reshape(ROWS, COLUMNS),
    "nothing": lambda gates, ups, fused: fused[:, :0].contiguous(),
}


def written(folder: Path, dtype: torch.dtype, seed: int) -> tuple[dict[str, torch.Tensor], WeightFiles]:
    """Random values, and the file that has them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fused": (EXPERTS, ROWS, COLUMNS)}
    for kind in ("gate", "up"):
        shapes |= {f"{number}.{kind}": (ROWS, COLUMNS) for number in range(EXPERTS)}  # type: ignore[dict-item]
    values = {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}
    save_file(values, folder / "model.safetensors")
    return values, find_weights(folder)


def arguments(tensors: dict[str, Any]) -> tuple[Any, Any, Any]:
    gates, ups = ([tensors[f"{number}.{kind}"] for number in range(EXPERTS)] for kind in ("gate", "up"))
    return gates, ups, tensors["fused"]


def read(files: WeightFiles, blocks: BlockMap, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements of a tensor, as a load reads them."""
    found = torch.full((numel,), torch.nan, dtype=dtype)
    reads = plan_reads(files, blocks, start, numel)
    with ChunkReader(files.paths) as reader:
        requests = [ChunkRequest(copy.chunk, None) for each in reads for copy in each.copies]
        data = (each for _, each in reader.verified(requests))
        for each in reads:
            found[each.begin : each.begin + each.numel] = each.values(data, dtype)
        assert next(data, None) is None
    return found


@pytest.mark.parametrize("limit", [8, block_reads.READ_BYTES])
@pytest.mark.parametrize("name", REARRANGED)
def test_ranges_have_the_values_that_torch_makes(
    name: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    monkeypatch.setattr(block_reads, "READ_BYTES", limit)
    monkeypatch.setattr(block_reads, "_SHORT_RUN_BYTES", 8 if limit == 8 else 1 << 16)
    monkeypatch.setattr(block_reads, "_ASSEMBLED_ELEMENTS", 1 if limit == 8 else 1 << 19)
    for stored, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        values, files = written(tmp_path, stored, seed)
        symbols = {key: FileTensor(BlockMap.stored(key, each.shape), dtype) for key, each in values.items()}
        expected = REARRANGED[name](*arguments({key: each.to(dtype) for key, each in values.items()}))
        made = REARRANGED[name](*arguments(symbols))
        assert isinstance(made, FileTensor) and (made.shape, made.dtype) == (expected.shape, dtype)
        assert made.blocks.shape == tuple(expected.shape)
        flat = expected.reshape(-1)
        for ranks in (1, 2, 5):
            size = max(1, -(-len(flat) // ranks))
            for start in range(0, len(flat), size):
                end = min(start + size, len(flat))
                found = read(files, made.blocks, start, end - start, dtype)
                assert torch.equal(found, flat[start:end]), f"seed {seed}, {start} to {end}"


def test_only_the_ranges_of_a_slice_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts in runs exactly the bytes of the slice, of transposed ones all bytes of what it touches."""
    monkeypatch.setattr(block_reads, "_ASSEMBLED_ELEMENTS", 1)
    values, files = written(tmp_path, torch.float32, random.randrange(2**32))
    symbols = {key: FileTensor(BlockMap.stored(key, each.shape), each.dtype) for key, each in values.items()}
    half = EXPERTS * ROWS * COLUMNS
    matrix = 4 * ROWS * COLUMNS
    for name, most in (("experts", 4 * half), ("experts transposed", 4 * matrix)):
        made = REARRANGED[name](*arguments(symbols))
        assert isinstance(made, FileTensor)
        reads = plan_reads(files, made.blocks, half, half)
        sizes = [copy.chunk.size for each in reads for copy in each.copies]
        assert 4 * half <= sum(sizes) <= most, name
        # In memory is one expert: its gate and its up projection.
        assert max(each.numel for each in reads) <= 2 * ROWS * COLUMNS, name


@pytest.mark.parametrize(
    "compute",
    [
        lambda fused: fused + 1,
        lambda fused: fused.to(torch.float64),
        lambda fused: fused[:, ::2],
        lambda fused: fused.expand(2, -1, -1, -1),
        lambda fused: fused.sum(),
    ],
)
def test_computing_with_values_is_refused(compute: Callable[[torch.Tensor], object]) -> None:
    fused = FileTensor(BlockMap.stored("fused", (EXPERTS, ROWS, COLUMNS)), torch.float32)
    with pytest.raises(UnsupportedConversion):
        compute(fused)


def test_a_pattern_of_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "MOST_BLOCKS", 5)
    fused = FileTensor(BlockMap.stored("fused", (EXPERTS, ROWS, COLUMNS)), torch.float32)
    with pytest.raises(UnsupportedConversion, match="at most 5 blocks"):
        fused.transpose(1, 2).reshape(EXPERTS, -1)
    assert math.prod(fused.shape) == EXPERTS * ROWS * COLUMNS
