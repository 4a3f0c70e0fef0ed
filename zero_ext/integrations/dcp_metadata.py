"""The table of a torch DCP checkpoint (``.metadata``), and pickles evaluated without running them.

``.metadata`` is a pickle of torch's dataclasses. Here it becomes records of names and values: nothing that it
names is imported or called, and a class or function that torch does not write is refused by name.
"""

from __future__ import annotations

import gc
import math
import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.files import CheckpointError, brief, read_limited, shortened
from zero_ext.integrations.torch_archive import UnfitContent, first_line

METADATA = ".metadata"
_LARGEST_BYTES = 1 << 30
_LARGEST_NUMBER = 1 << 62
_MOST_DIMENSIONS = 64
_MOST_FIELDS = 16
_LONGEST_NAME = 200
_MOST_COMPARED = 64  # other boxes for a box of a tensor; sharding along few dimensions leaves few to compare
_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CALLED = {
    *(_CLASSES + name for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(_CLASSES + name for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    _CLASSES + "TensorProperties",
    _INFO,
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
}
_MEMBER_OF_ENUM = "builtins.getattr"


class DcpChunk(NamedTuple):
    """A box of a tensor, saved by ``torch.save`` to bytes [begin, begin + size) of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    size: int


class DcpTensor(NamedTuple):
    """A tensor in boxes that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DcpChunk, ...]


class Global(str):
    """The full name of a class or function."""


class Pairs(list[tuple[Any, Any]]):
    """The items of a dict. Keys are not hashed, which a hostile one could make slow."""


@dataclass(slots=True)
class Record:
    """An object by what it is made of: a class or function, its arguments, and the state set after it."""

    function: str
    arguments: Any
    state: Any = None


def evaluate_pickle(data: bytes, called: Collection[str]) -> Any:
    """Return the content of a pickle of protocols 2 to 5, with records in the place of objects.

    Args:
        data: the pickle.
        called: full names of the classes and functions that it may name for objects.

    Raises:
        ValueError: it is truncated, names another one, or has an opcode that such pickles do not need.
    """
    try:
        return _Evaluation(called).run(data)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise UnfitContent(f"its pickle does not fit together: {brief(str(error))}") from error


_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": Pairs}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_GETS, _PUTS = ("BINGET", "LONG_BINGET"), ("BINPUT", "LONG_BINPUT")


class _Evaluation:
    def __init__(self, called: Collection[str]) -> None:
        self._called = called
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            elif name in _GETS:
                self._stack.append(self._memo[argument])
            elif name in _VALUES:
                self._stack.append(argument)
            elif name in _PUTS:
                self._memo[argument] = self._stack[-1]
            else:
                self._build(name, argument)
        (found,) = self._stack
        return found

    def _build(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "GLOBAL":
            stack.append(Global(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            if any(type(each) is not str or len(each) > _LONGEST_NAME for each in stack[-2:]):
                raise UnfitContent("it names a class by something other than two short strings")
            stack[-2:] = [Global(".".join(stack[-2:]))]
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = stack[-2:]
            if function == _MEMBER_OF_ENUM:
                # Early releases of Python 3.11, as 3.11.2, write a member by its name, others by its value.
                function, *arguments = arguments
            if not isinstance(function, Global) or function not in self._called:
                raise UnfitContent(f"it calls {brief(function)}")
            stack[-2:] = [Record(function, arguments)]
        elif name == "BINPERSID":
            stack[-1] = Record("storage", stack[-1])
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "MARK":
            self._below.append(stack)
            self._stack = []
        elif name == "TUPLE":
            self._stack = [*self._below.pop(), tuple(stack)]
        else:
            self._extend(name)

    def _extend(self, name: str) -> None:
        if name in ("APPENDS", "SETITEMS"):
            items, self._stack = self._stack, self._below.pop()
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items, self._stack[-count:] = self._stack[-count:], []
        elif name in ("PROTO", "FRAME", "STOP"):
            return
        else:
            raise UnfitContent(f"its pickle has the opcode {name}, which torch does not write")
        # A state dict may be an OrderedDict, which is an object.
        into = self._stack[-1]
        if name.startswith("APPEND"):
            into.extend(items)
        elif isinstance(into, Pairs):
            into.extend(zip(items[::2], items[1::2], strict=True))


def read_metadata(folder: Path) -> tuple[dict[str, DcpTensor], bytes]:
    """Return the tensors of a checkpoint that ``torch.distributed.checkpoint.save`` wrote, and its table.

    Values other than tensors are left out. CheckpointError names the table and what is wrong with it: a class
    that torch does not write, a file outside the folder, boxes that overlap or leave holes.
    """
    path = folder / METADATA
    collects = gc.isenabled()
    gc.disable()  # It would take most of the time, over millions of objects that all stay.
    try:
        data = read_limited(path, _LARGEST_BYTES)
        return _tensors(evaluate_pickle(data, _CALLED)), data
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{path}: refused: expected the table of torch.distributed.checkpoint.save, got another: "
            f"{shortened(first_line(error), 500)}. Save again with its HuggingFaceStorageWriter and "
            "enable_consolidation=True: load_weights reads its files too."
        ) from error
    finally:
        if collects:
            gc.enable()


def _tensors(metadata: Any) -> dict[str, DcpTensor]:
    fields = _fields(metadata, _CLASSES + "Metadata")
    stored: dict[tuple[Any, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in _pairs(fields, "storage_data"):
        key = _fields(index, _CLASSES + "MetadataIndex")
        if key.get("offset") is not None:
            stored[_name(key.get("fqn")), _numbers(key["offset"])] = _address(_fields(info, _INFO))
    tensors: dict[str, DcpTensor] = {}
    left = len(stored)
    for name, value in _pairs(fields, "state_dict_metadata"):
        if isinstance(value, Record) and value.function == _CLASSES + "BytesStorageMetadata":
            continue
        entry, name = _fields(value, _CLASSES + "TensorStorageMetadata"), _name(name)
        boxes = entry.get("chunks")
        if not isinstance(boxes, list) or len(boxes) > left:
            raise UnfitContent(f"{name!r:.200}: it has more chunks than are stored")
        left -= len(boxes)
        if name in tensors:
            raise UnfitContent(f"{name!r:.200}: it is listed twice")
        tensors[name] = _tensor(name, entry, boxes, stored)
    return tensors


def _tensor(name: str, entry: dict[str, Any], boxes: list[Any], stored: dict[Any, Any]) -> DcpTensor:
    properties, shape, chunks = entry.get("properties"), _numbers(entry.get("size")), []
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    found = vars(torch).get(dtype.removeprefix("torch.")) if isinstance(dtype, Global) else None
    if not isinstance(found, torch.dtype):
        raise UnfitContent(f"{name!r:.200}: expected a dtype of torch, got {brief(dtype)}")
    for box in boxes:
        fields = _fields(box, _CLASSES + "ChunkStorageMetadata")
        offsets, sizes = _numbers(fields.get("offsets")), _numbers(fields.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise UnfitContent(f"{name!r:.200}: a chunk has another number of dimensions")
        if 0 in sizes:  # of a rank whose shard is empty
            continue
        if (name, offsets) not in stored:
            raise UnfitContent(f"{name!r:.200}: the chunk at {offsets} is stored nowhere")
        chunk = DcpChunk(offsets, sizes, *stored[name, offsets])
        if math.prod(sizes) * found.itemsize > chunk.size:
            raise UnfitContent(f"{name!r:.200}: the chunk at {offsets} has only {chunk.size} bytes")
        chunks.append(chunk)
    _check_cover(name, shape, chunks)
    return DcpTensor(shape, found, tuple(chunks))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[DcpChunk]) -> None:
    """Check that boxes neither overlap nor leave holes nor reach outside, which their sizes then say."""
    # Along the dimension of most shards few boxes are open at a time.
    dim = max(range(len(shape)), key=lambda each: len({one.offsets[each] for one in chunks}), default=None)
    opened: list[DcpChunk] = []
    left = _MOST_COMPARED * len(chunks) + (1 << 20)
    for chunk in sorted(chunks, key=lambda one: 0 if dim is None else one.offsets[dim]):
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > extent for end, extent in zip(ends, shape, strict=True)):
            raise UnfitContent(
                f"{name!r:.200}: the chunk at {chunk.offsets} of {chunk.sizes} reaches outside shape {shape}"
            )
        if dim is not None:
            opened = [one for one in opened if one.offsets[dim] + one.sizes[dim] > chunk.offsets[dim]]
        left -= len(opened)
        if left < 0:
            raise UnfitContent(f"{name!r:.200}: it is cut into too many chunks along too many dimensions")
        for one in opened:
            if all(
                low < other + size and other < end
                for low, end, other, size in zip(chunk.offsets, ends, one.offsets, one.sizes, strict=True)
            ):
                raise UnfitContent(f"{name!r:.200}: the chunks at {one.offsets} and {chunk.offsets} overlap")
        opened.append(chunk)
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise UnfitContent(f"{name!r:.200}: its chunks have {covered} of {math.prod(shape)} elements")


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of ``kind``. Torch's have few."""
    if not isinstance(value, Record) or value.function != kind:
        raise UnfitContent(f"expected a {kind}, got a {type(value).__name__}")
    if value.state is None:
        return {}
    if not isinstance(value.state, Pairs) or len(value.state) > _MOST_FIELDS:
        raise UnfitContent(f"expected the attributes of a {kind}, got others")
    return {key: each for key, each in value.state if isinstance(key, str)}


def _pairs(fields: dict[str, Any], name: str) -> Pairs:
    found = fields.get(name)
    if not isinstance(found, Pairs):
        raise UnfitContent(f"{name}: expected a dict, got a {type(found).__name__}")
    return found


def _name(value: Any) -> str:
    if type(value) is not str:
        raise UnfitContent(f"expected a name, got a {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_NUMBER:
        raise UnfitContent(f"expected a number from 0, got {brief(value)}")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return a ``torch.Size``."""
    arguments = value.arguments if isinstance(value, Record) and value.function == "torch.Size" else None
    items = arguments[0] if isinstance(arguments, tuple) and len(arguments) == 1 else None
    if not isinstance(items, tuple) or len(items) > _MOST_DIMENSIONS:
        raise UnfitContent(f"expected a torch.Size, got a {type(value).__name__}")
    return tuple(map(_number, items))


def _address(info: dict[str, Any]) -> tuple[str, int, int]:
    file = _name(info.get("relative_path"))
    if Path(file).name != file or "\0" in file:
        raise UnfitContent(f"expected a file of the same folder, got {brief(file)}")
    if info.get("transform_descriptors") is not None:
        raise UnfitContent(f"{brief(file)}: it was written through stream transforms")
    return file, _number(info.get("offset")), _number(info.get("length"))
