"""The weights of a torch DCP checkpoint as a load into a prepared model reads them: a slice at a time."""

from __future__ import annotations

import hashlib
import itertools
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch

from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader, ChunkRequest
from zero_ext.checkpoint.files import CheckpointError, brief
from zero_ext.checkpoint.format.tensor_files import is_logical_order, memory_order, row_major
from zero_ext.checkpoint.load_plan import Fill, read_fills
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging
from zero_ext.checkpoint.weights.weight_sources import CHUNK_BYTES, StoredWeight, Wanted
from zero_ext.integrations.dcp_metadata import DcpChunk, DcpTensor, Record, evaluate_pickle, read_metadata
from zero_ext.integrations.torch_archive import UnfitContent, torch_archive, verify_records

_ADVICE = "Use another checkpoint."
_REBUILD = "torch._utils._rebuild_tensor_v2"
_LOCAL_HEADER = 30  # bytes before the name in a zip archive; the lengths of name and extra field are the last


class _Layout(NamedTuple):
    """The byte of its file that a chunk begins at, and its stride."""

    begin: int
    stride: tuple[int, ...]


class DcpWeights:
    """Implements ``WeightSource`` for what ``torch.distributed.checkpoint.save`` wrote to ``folder``.

    ``CheckpointError`` says what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors, self._table = read_metadata(folder)
        files = sorted({chunk.file for tensor in self._tensors.values() for chunk in tensor.chunks})
        self._numbers = {file: number for number, file in enumerate(files)}
        try:
            self._sizes = {file: (folder / file).stat().st_size for file in files}
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: it cannot be read: {error.strerror}. Copy the files of all ranks."
            ) from error
        for name, tensor in self._tensors.items():
            for chunk in tensor.chunks:
                if chunk.begin + chunk.size > self._sizes[chunk.file]:
                    raise CheckpointError(
                        f"{folder / chunk.file}: expected {name!r:.200} in bytes {chunk.begin} to "
                        f"{chunk.begin + chunk.size}, got a file of {self._sizes[chunk.file]}. {_ADVICE}"
                    )
        self.tensors = {
            name: StoredWeight(tensor.shape, row_major(tensor.shape), tensor.dtype)
            for name, tensor in self._tensors.items()
        }

    def digest(self) -> str:
        """See :class:`WeightSource`."""
        return f"{hashlib.sha256(self._table).hexdigest()} {sorted(self._sizes.items())}"

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """See :class:`WeightSource`."""
        chunks = [(key, chunk) for key in sorted(wanted) for chunk in self._tensors[key].chunks]
        for key, chunk in chunks[rank::world_size]:
            self._layout(key, chunk, verify=True)

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """See :class:`WeightSource`."""
        fills: list[Fill] = []
        with ChunkReader([self._folder / file for file in self._numbers]) as reader:
            for key, slices in wanted.items():
                shape, dtype, chunks = self._tensors[key]
                for chunk in chunks:
                    runs = list(_common_runs(shape, chunk, slices))
                    if not runs:
                        continue
                    begin, stride = self._layout(key, chunk)
                    where = Chunk(
                        self._numbers[chunk.file],
                        begin,
                        math.prod(chunk.sizes) * dtype.itemsize,
                        None,
                        repr(key),
                    )
                    if is_logical_order(chunk.sizes, stride):
                        fills += [fill for run in runs for fill in _fills(where, dtype, *run)]
                        continue
                    data = torch.empty(where.size, dtype=torch.uint8, device="cpu")
                    list(reader.read([ChunkRequest(where, data)]))
                    values = data.view(dtype).as_strided(chunk.sizes, stride).reshape(-1)
                    for target, at, first, numel in runs:
                        target.put(at, values[first : first + numel], staging)
            read_fills(reader, sorted(fills, key=lambda fill: fill.chunk[:2]), staging)

    def _layout(self, key: str, chunk: DcpChunk, verify: bool = False) -> _Layout:
        path, label = self._folder / chunk.file, f"{key!r:.200} at {chunk.offsets}"
        with torch_archive(path, f"({label}) {_ADVICE}", chunk.begin, chunk.size) as archive:
            if verify:
                verify_records(archive)
            return _layout_of(archive, self._tensors[key], chunk)


def _layout_of(archive: zipfile.ZipFile, tensor: DcpTensor, chunk: DcpChunk) -> _Layout:
    """Return the layout of the tensor that ``torch.save`` wrote. ``ValueError`` if it is not the chunk."""
    records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
    if not {"data.pkl", "byteorder"} <= records.keys() or archive.read(records["byteorder"]) != b"little":
        raise UnfitContent("expected a tensor in little-endian byte order")
    saved = evaluate_pickle(archive.read(records["data.pkl"]), {_REBUILD, "collections.OrderedDict"})
    match saved:
        case Record(
            arguments=(
                Record(function="storage", arguments=(_, str(kind), str(key), *_)),
                int(offset),
                tuple(sizes),
                tuple(stride),
                *_,
            ),
        ):
            pass
        case _:
            raise UnfitContent("expected a tensor, got another object")
    expected = torch.storage._dtype_to_storage_type_map().get(tensor.dtype)
    if (sizes, kind) != (chunk.sizes, f"torch.{expected}"):
        raise UnfitContent(f"expected {tensor.dtype} of {chunk.sizes}, got {brief(kind)} of {brief(sizes)}")
    if any(type(one) is not int or one < 0 for one in (offset, *stride)):
        raise UnfitContent(f"expected an offset and strides, got {brief((offset, stride))}")
    memory_order(sizes, stride)  # which refuses one with holes
    record = records.get(f"data/{key}")
    if record is None or (offset + math.prod(sizes)) * tensor.dtype.itemsize > record.file_size:
        raise UnfitContent(f"expected {math.prod(sizes)} elements of data/{key:.40}, got fewer bytes")
    # The central directory does not say how long the header before the bytes is.
    file = cast(IO[bytes], archive.fp)
    file.seek(record.header_offset + _LOCAL_HEADER - 4)
    lengths = file.read(4)
    header = _LOCAL_HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    begin = record.header_offset + header
    if begin + record.file_size > chunk.size:
        raise UnfitContent(f"expected a record within {chunk.size} bytes, got one that ends after them")
    return _Layout(chunk.begin + begin + offset * tensor.dtype.itemsize, stride)


def _fills(
    chunk: Chunk, dtype: torch.dtype, target: CheckpointSlice, at: int, first: int, numel: int
) -> Iterator[Fill]:
    """Yield the reads of one run of :func:`_common_runs`."""
    step = CHUNK_BYTES // dtype.itemsize
    for skip in range(0, numel, step):
        count = min(step, numel - skip)
        begin, size = chunk.offset + (first + skip) * dtype.itemsize, count * dtype.itemsize
        own = chunk._replace(offset=begin, size=size)
        yield Fill(own, dtype, 0, target, at + skip, at + skip + count)


def _common_runs(
    shape: tuple[int, ...], chunk: DcpChunk, slices: Sequence[CheckpointSlice]
) -> Iterator[tuple[CheckpointSlice, int, int, int]]:
    """Yield what ``slices`` have of a chunk: the slice, the first element in it and in the chunk, and the
    number that follow one another in both, in row-major order."""
    strides = row_major(shape)
    outer = len(shape)
    while outer and chunk.sizes[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(outer - 1, 0)
    run = math.prod(chunk.sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, chunk.sizes[:outer]))):
        start = base + sum(each * stride for each, stride in zip(index, strides, strict=False))
        for target in slices:
            first, end = max(target.start, start), min(target.start + target.numel, start + run)
            if first < end:
                yield target, first - target.start, number * run + first - start, end - first
