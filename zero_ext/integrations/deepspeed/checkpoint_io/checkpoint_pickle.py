"""Opens the pickled files of a DeepSpeed checkpoint without running anything that is in them.

torch's restricted unpickler builds tensors and plain values. The few classes of DeepSpeed's that such files
hold are replaced by the inert ones here; any other class or function is refused by name.
"""

from __future__ import annotations

import pickletools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.deepspeed.deepspeed_config import ZeroStageEnum
from zero_ext.integrations.torch_archive import UnfitContent, first_line, torch_archive, verify_records


class StubScaler:
    """Stands for DeepSpeed's loss scalers: attributes, no behavior."""


class StubFragment:
    """Stands for the address of a parameter's fragment in a partition: ``numel`` and ``start``."""


class StubShape:
    """Stands for the shape of a parameter that joins several: attributes."""


class StubStage(int):
    """Stands for the enumeration of ZeRO stages: the number."""


def _stage_by_name(kind: type, name: str) -> StubStage:
    """Return the stage that ``getattr(kind, name)`` stands for. Early releases of Python 3.11, as 3.11.2,
    pickle members of enumerations by name."""
    if kind is not StubStage or name not in ZeroStageEnum.__members__:
        raise UnfitContent("it calls builtins.getattr for something else than a stage of ZeRO")
    return StubStage(ZeroStageEnum[name])


_STUBS: list[tuple[Callable[..., Any], str]] = [
    (StubScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StubScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StubFragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (StubShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (StubStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_stage_by_name, "builtins.getattr"),
]
# What torch allows is one list for the whole process.
_allowing = threading.Lock()


def read_pickled(path: Path, kinds: tuple[type, ...] = (dict,)) -> Any:
    """Return the dict, or other one of ``kinds``, that ``torch.save`` wrote to ``path``, tensors mapped from
    the file and not yet read.

    Time and memory are linear in the size of the file. CheckpointError names the file, and the class or
    function if one is neither torch's own nor among the stubs above: nothing of it has been imported or
    called. The same for a file that is missing, no regular file, truncated, compressed or not written by
    ``torch.save``, for a tensor that reaches outside its file, and for content that repeats itself so often
    that it is much larger than the file.
    """
    with torch_archive(path):
        pass
    try:
        pickle = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        check_opcodes(pickle, (name for _, name in _STUBS))
        with _only_stubs():
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if type(found) not in kinds:
            raise UnfitContent(f"it holds a {type(found).__name__}, not a {kinds[0].__name__}")
        check_expanded([found], len(pickle), path.stat().st_size)
    except Exception as error:
        raise CheckpointError(
            f"{path}: refused: expected what DeepSpeed writes, got another pickle: "
            f"{_first_line(error)}. Save the checkpoint again without it, as in client_state, or use another "
            "one."
        ) from error
    return found


def verify_pickled(path: Path) -> None:
    """Read every byte of ``path`` and compares the checksums that ``torch.save`` has put into it.

    Only of the kinds of record that it writes: no compression, so no record is longer than the file.

    CheckpointError names the file and the record that is damaged.
    """
    with torch_archive(path, "Use another checkpoint, or verify=False if it was saved without.") as archive:
        verify_records(archive)


@contextmanager
def _only_stubs() -> Iterator[None]:
    """Let torch build the stubs and its own classes, and nothing that others have registered."""
    with _allowing:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(_STUBS))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    for mark in ("Unsupported global", "Trying to"):
        if mark in text:
            return text[text.index(mark) :].split(". ")[0].splitlines()[0]
    return first_line(error)


_REBUILDERS = {
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
}
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls its first argument; tensors with attributes
_CALLED = {
    *_REBUILDERS,
    _OF_TYPE,
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.complex",
    "builtins.set",
    "_codecs.encode",
}
_PLAIN = {
    "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET",
    "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_DROPS = {"APPEND": 1, "BUILD": 1, "SETITEM": 2}
_LATIN1 = "text and 'latin1'"  # the arguments of _codecs.encode, by which protocol 2 writes bytes
_LARGEST_KEY = 100
_LARGEST_IN_SET = 1000
_MOST_LARGE_NUMBERS = 1000
_LARGEST_WEIGHT = 1 << 40
_DEEPEST = 100
_EXPANSION = 32
_ALLOWANCE = 1 << 20
_BESIDE_TEXT = 8


def check_opcodes(data: bytes, also_called: Iterable[str] = ()) -> None:
    """Check the opcodes of a pickle without running them, in time linear in its length.

    Args:
        data: the pickle.
        also_called: full names of classes and functions that it may call besides those that ``torch.save``
            needs.

    Raises:
        ValueError: it calls anything else, so a constructor could allocate any amount of memory; or loading
            it would hash huge tuples or many numbers that share a hash.
    """
    _Scan(_CALLED.union(also_called)).run(data)


class _Arguments(int):
    """The weight of a tuple with the class or function `first` as its first item."""

    first: str


class _Scan:
    """The stack of an unpickler, with the weight of each item instead of its value.

    The weight of a tuple is the number of items that hashing it touches. Lists and dicts have no hash and
    weigh 1. A class or function is its full name.
    """

    def __init__(self, called: set[str]) -> None:
        self._called = called
        self._stack: list[int | str] = []
        self._below: list[list[int | str]] = []
        self._memo: dict[int, int | str] = {}
        self._heaviest = 0
        self._large_numbers = 0
        self._makes_sets = False

    def run(self, data: bytes) -> None:
        """Go through all opcodes."""
        try:
            for opcode, argument, _ in pickletools.genops(data):
                self._step(opcode.name, argument)
        except (IndexError, KeyError) as error:
            raise UnfitContent("its pickle takes from an empty stack or memo") from error
        if self._makes_sets and self._heaviest > _LARGEST_IN_SET:
            raise UnfitContent(f"it makes sets, and a tuple expands to {self._heaviest} items")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _PLAIN:
            stack.append(_LATIN1 if argument == "latin1" else 1)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "GLOBAL":
            # Protocol 2 writes the name that Python 2 had.
            stack.append(argument.replace(" ", ".").replace("__builtin__.", "builtins."))
        elif name == "LONG1":
            self._count_number(argument)
            stack.append(1)
        elif name in _TUPLES:
            self._push_tuple(self._pop(_TUPLES[name]))
        elif name in _DROPS:
            popped = self._pop(_DROPS[name])
            if name == "SETITEM":
                self._check_keys(popped)
        elif name in ("REDUCE", "NEWOBJ"):
            self._call(*self._pop(2))
        elif name == "BINPERSID":
            stack[-1] = 1
        else:
            self._step_with_marks(name)

    def _step_with_marks(self, name: str) -> None:
        if name == "MARK":
            self._below.append(self._stack)
            self._stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, self._stack = self._stack, self._below.pop()
            if name == "TUPLE":
                self._push_tuple(items)
            elif name == "SETITEMS":
                self._check_keys(items)
        elif name not in ("PROTO", "STOP"):
            raise UnfitContent(f"its pickle has the opcode {name}, which torch.save does not write")

    def _pop(self, count: int) -> list[int | str]:
        popped = self._stack[-count:]
        if len(popped) != count:
            raise IndexError
        del self._stack[-count:]
        return popped

    def _push_tuple(self, items: list[int | str]) -> None:
        weight = min(1 + sum(map(_weight, items)), _LARGEST_WEIGHT)
        self._heaviest = max(self._heaviest, weight)
        if items and isinstance(items[0], str) and items[0] != _LATIN1:
            weight = _Arguments(weight)
            weight.first = items[0]
        self._stack.append(_LATIN1 if len(items) == 2 and items[1] == _LATIN1 else weight)

    def _check_keys(self, items: list[int | str]) -> None:
        for key in items[::2]:
            if _weight(key) > _LARGEST_KEY:
                raise UnfitContent(f"a tuple that is a key expands to {_weight(key)} items")

    def _count_number(self, number: int) -> None:
        # Python's hash of a number is its remainder by 2**61 - 1, so any two of these can share one.
        self._large_numbers += number.bit_length() > 64
        if self._large_numbers > _MOST_LARGE_NUMBERS:
            raise UnfitContent(f"it holds more than {_MOST_LARGE_NUMBERS} numbers of more than 64 bits")

    def _call(self, function: int | str, arguments: int | str) -> None:
        if function not in self._called:
            raise UnfitContent(f"it calls {function if isinstance(function, str) else 'a value'!r:.200}")
        if function == _OF_TYPE and getattr(arguments, "first", None) not in _REBUILDERS:
            raise UnfitContent(f"it calls {_OF_TYPE} of something else than a tensor")
        if function == "_codecs.encode" and arguments != _LATIN1:
            raise UnfitContent("it calls _codecs.encode for another encoding than 'latin1'")
        if function == "collections.OrderedDict" and _weight(arguments) > 1:
            raise UnfitContent("it calls collections.OrderedDict with arguments")
        self._makes_sets |= function == "builtins.set"
        self._stack.append(min(1 + _weight(arguments), _LARGEST_WEIGHT))


def _weight(item: int | str) -> int:
    return item if isinstance(item, int) else 1


class _Extent(NamedTuple):
    """Size of a value as a tree: bytes of text and numbers, bytes of tensors, levels."""

    plain: int
    tensors: int
    levels: int


def check_expanded(value: object, pickle_bytes: int, file_bytes: int) -> None:
    """Check the size of a loaded value as a tree, in time linear in the number of objects and references.

    Raises:
        ValueError: it contains itself, is nested deeper than 100 levels, or is larger than 32 times the
            pickle and 1 MiB; or its tensors are larger than 32 times the file and 1 MiB, or one of them
            reaches outside its storage.
    """
    most_plain, most_tensors = (_EXPANSION * size + _ALLOWANCE for size in (pickle_bytes, file_bytes))
    found: dict[int, _Extent] = {}
    unfinished: set[int] = set()
    pending = [value]
    while pending:
        item = pending[-1]
        if id(item) in found:
            pending.pop()
            continue
        children = _children(item)
        inner = [child for child in children if _is_container(child) and id(child) not in found]
        if inner:
            if id(item) in unfinished or any(id(child) in unfinished for child in inner):
                raise UnfitContent("it contains itself")
            unfinished.add(id(item))
            pending.extend(inner)
            continue
        unfinished.discard(id(item))
        pending.pop()
        extent = found[id(item)] = _joined(children, found)
        if extent.levels > _DEEPEST:
            raise UnfitContent(f"it is nested deeper than {_DEEPEST} levels")
        if extent.plain > most_plain or extent.tensors > most_tensors:
            raise UnfitContent(
                f"it repeats its parts: as a tree it takes {extent.plain} bytes and {extent.tensors} bytes "
                f"of tensors, more than {_EXPANSION} times the file"
            )


def _joined(children: Iterable[object], found: Mapping[int, _Extent]) -> _Extent:
    plain = _BESIDE_TEXT
    tensors = levels = 0
    for child in children:
        extent = found[id(child)] if _is_container(child) else _leaf(child)
        plain += extent.plain
        tensors += extent.tensors
        levels = max(levels, extent.levels)
    return _Extent(plain, tensors, levels + 1)


def _leaf(value: object) -> _Extent:
    if isinstance(value, torch.Tensor):
        _check_tensor(value)
        return _Extent(_BESIDE_TEXT, value.numel() * value.element_size(), 0)
    if isinstance(value, str | bytes):
        return _Extent(_BESIDE_TEXT + len(value), 0, 0)
    return _Extent(_BESIDE_TEXT + (value.bit_length() // 8 if isinstance(value, int) else 0), 0, 0)


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UnfitContent(f"it holds a tensor of {tensor.layout} on {tensor.device}, not a strided one")
    if tensor.numel() == 0:
        return
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end, stored = (tensor.storage_offset() + reach) * tensor.element_size(), tensor.untyped_storage().nbytes()
    # Torch does not promise this for mapped files.
    if end > stored:
        raise UnfitContent(
            f"a tensor of shape {tuple(tensor.shape)} reaches byte {end} of a record of {stored}"
        )


def _is_container(value: object) -> bool:
    return isinstance(value, dict | list | tuple | set | frozenset) or _attributes(value) is not None


def _attributes(value: object) -> dict[str, object] | None:
    """Return the attributes of an instance of one of the stubs, which are the only ones in this package."""
    return (
        vars(value) if type(value).__module__.startswith("zero_ext.") and hasattr(value, "__dict__") else None
    )


def _children(value: object) -> list[object]:
    attributes = _attributes(value)
    if attributes is not None:
        return list(attributes.values())
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []
