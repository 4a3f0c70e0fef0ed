"""The fields of DeepSpeed's files that are read, with their types. Errors name the file and the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from typing_extensions import Self

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.files import brief, shortened
from zero_ext.checkpoint.format.manifest import Count
from zero_ext.checkpoint.format.tensor_files import SAFETENSORS_CODES
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import (
    StubFragment,
    StubScaler,
    read_pickled,
)
from zero_ext.integrations.torch_archive import UnfitContent

Check = Callable[[Any], Any]
_MOST_DIMENSIONS = 64
_LARGEST = 1 << 62


def is_flat(value: object) -> bool:
    """Return whether ``value`` is a contiguous one-dimensional tensor of floats."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 1
        and value.is_contiguous()
        and value.dtype.is_floating_point
        and value.dtype in SAFETENSORS_CODES
    )


def _flat(value: Any) -> torch.Tensor:
    if not is_flat(value):
        raise UnfitContent(f"expected a one-dimensional tensor of floats, got {seen(value)}")
    return cast(torch.Tensor, value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise UnfitContent(f"expected a number from 0, got {seen(value)}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MOST_DIMENSIONS:
        raise UnfitContent(f"expected a shape, got {seen(value)}")
    return tuple(map(_count, value))


def _name(value: Any) -> str:
    if type(value) is not str or not value:
        raise UnfitContent(f"expected a name, got {seen(value)}")
    return value


def _address(value: Any) -> tuple[int, int]:
    if not isinstance(value, StubFragment):
        raise UnfitContent(f"expected the address of a fragment, got {seen(value)}")
    return _count(vars(value).get("start")), _count(vars(value).get("numel"))


def _group(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UnfitContent(f"expected a dict, got {seen(value)}")
    return value


def _one_for_all(counts: Any) -> Any:
    if isinstance(counts, list) and len(set(map(repr, counts))) != 1:
        raise UnfitContent("expected one number of ranks for all groups, not several as of experts")
    return counts[0] if isinstance(counts, list) else counts


def _with_groups(optimizer: Any) -> Any:
    if isinstance(optimizer, list):
        raise UnfitContent("it has no param groups, as 'elastic_checkpoint' leaves them out: save without it")
    return optimizer


def _items(check: Check) -> Check:
    """Return a check of lists up to the first wrong item: pydantic would report all, in far more memory."""

    def checked(items: Any) -> list[Any]:
        if not isinstance(items, list):
            raise UnfitContent(f"expected a list, got {seen(items)}")
        return [_at(number, check, item) for number, item in enumerate(items)]

    return checked


def _table(check: Check = lambda value: value) -> Check:
    """Return the same of dicts with names as keys."""

    def checked(table: Any) -> dict[str, Any]:
        return {_name(name): _at(name, check, value) for name, value in _group(table).items()}

    return checked


def _at(key: object, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UnfitContent(f"{shortened(str(key), 100)}: {error}") from None


Table = Annotated[dict[str, Any], PlainValidator(_table())]
Shapes = Annotated[dict[str, tuple[int, ...]], PlainValidator(_table(_shape))]


class Foreign(BaseModel):
    """Keys of a dict; others are not looked at."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)

    @classmethod
    def of(cls, values: object, path: Path, where: str = "") -> Self:
        """Return those of ``values``, which is ``where`` in the file ``path``; CheckpointError for a wrong
        one.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(filter(None, (where, *map(str, problem["loc"]))))
            what = problem["msg"].removeprefix("Value error, ")
            if problem["type"] != "value_error":
                what = f"{what}, got {seen(problem['input'])}"
            raise damaged(path, key or "content", what) from None


class Optimizer(Foreign):
    """The optimizer that DeepSpeed wraps. Its parameters are flat tensors, known by their numbers."""

    state: dict[Any, Any]
    param_groups: Annotated[list[dict[Any, Any]], PlainValidator(_items(_group))]


class OptimizerFile(Foreign):
    """The state in an ``*_optim_states.pt`` file. ``masters`` are this rank's fp32 partitions;
    ``param_alignment_paddings`` the elements left free after each parameter of every group, and
    ``param_slice_mappings`` begin and elements of each parameter's fragment, where they are written down."""

    zero_stage: Annotated[int, Field(ge=1, le=3)]
    partition_count: Annotated[Count, BeforeValidator(_one_for_all)]
    masters: Annotated[list[torch.Tensor], PlainValidator(_items(_flat))] = Field(
        validation_alias=AliasChoices("single_partition_of_fp32_groups", "fp32_flat_groups")
    )
    optimizer: Annotated[Optimizer, BeforeValidator(_with_groups)] = Field(
        validation_alias=AliasChoices("base_optimizer_state", "optimizer_state_dict")
    )
    loss_scaler: StubScaler | None = None
    param_alignment_paddings: Annotated[list[list[int]], PlainValidator(_items(_items(_count)))] | None = None
    param_slice_mappings: (
        Annotated[list[dict[str, tuple[int, int]]], PlainValidator(_items(_table(_address)))] | None
    ) = None


class ModelFile(Foreign):
    """A ``*_model_states.pt`` file. What is not read is here so that it is not taken for the client's."""

    module: Table
    buffer_names: Annotated[list[str], PlainValidator(_items(_name))]
    param_shapes: Annotated[list[dict[str, tuple[int, ...]]], PlainValidator(_items(_table(_shape)))]
    frozen_param_shapes: Shapes | None = None
    frozen_param_fragments: Table | None = None
    shared_params: Annotated[dict[str, str], PlainValidator(_table(_name))] | None = None
    lr_scheduler: dict[Any, Any] | None = None
    skipped_steps: Count
    global_steps: Count
    global_samples: Any = None
    dp_world_size: Count | None = None
    mp_world_size: Any = None
    ds_config: Any = None
    ds_version: Any = None
    optimizer: Any = None
    data_sampler: Any = None
    random_ltd: Any = None
    sparse_tensor_module_names: Any = None
    checkpoint_parallel_dimensions: Any = None

    def configured(self, *keys: str) -> Any:
        """Return what DeepSpeed's JSON says at these keys; None if it says nothing."""
        value = self.ds_config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def client_state(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what the user gave to ``save_checkpoint``, of a model's file."""
    return {key: value for key, value in content.items() if key not in ModelFile.model_fields}


def damaged(path: Path, what: str, problem: str) -> CheckpointError:
    """Return the error about ``what`` in the file ``path``, to be raised."""
    return CheckpointError(
        f"{path}: {what}: {problem}. It is damaged, or of a DeepSpeed that this reader does not support. Use "
        "another checkpoint."
    )


def seen(value: object) -> str:
    """``value`` in an error: what would take long to show is its type."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return brief(value) if plain else f"a {type(value).__name__}"


def stored_tensor(table: Mapping[Any, Any], name: str, path: Path) -> torch.Tensor:
    """Return the tensor ``name`` of a table in the file ``path``; CheckpointError for none that can be
    stored.
    """
    value = table.get(name)
    if not isinstance(value, torch.Tensor) or value.dtype not in SAFETENSORS_CODES:
        raise damaged(path, name, f"expected a tensor that can be stored, got {seen(value)}")
    return value


def one_number(value: object) -> float | None:
    """``value`` if it is a number or a tensor of one element, else None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class RankState:
    """One rank's ``file`` at ``path``. Its masters are one for each param group (stages 1 and 2) or sub-group
    (stage 3), ``moments`` the tensors of the optimizer's state besides each, as long or longer by padding,
    ``scalars`` the rest of that state. ``groups`` are settings, ``flat_groups`` the group of every flat."""

    path: Path
    file: OptimizerFile
    moments: list[dict[str, torch.Tensor]]
    scalars: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    flat_groups: list[int]

    @property
    def sizes(self) -> list[int]:
        """Elements of every flat."""
        return [flat.numel() for flat in self.file.masters]

    def plain(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks."""
        return {
            "stage": self.file.zero_stage,
            "partition_count": self.file.partition_count,
            "number of flat groups": len(self.file.masters),
            "param groups": self.groups,
            "optimizer state besides tensors": self.scalars,
            "kinds of optimizer state": [sorted(moments) for moments in self.moments],
            "alignment paddings": self.file.param_alignment_paddings,
        }


def read_rank(path: Path) -> RankState:
    """Read the table of an ``*_optim_states.pt`` file; tensors stay in the file until they are used.

    CheckpointError naming the file and the field for anything that is not as DeepSpeed writes it.
    """
    values = read_pickled(path).get("optimizer_state_dict")
    if isinstance(values, dict) and path.name.startswith("bf16_"):
        # The optimizer of plain bf16 runs does not say that it partitions as stage 1 does.
        values = {"zero_stage": 1, **values}
    file = OptimizerFile.of(values, path, "optimizer_state_dict")
    for key in ("param_alignment_paddings", "param_slice_mappings"):
        entries = getattr(file, key)
        if entries is not None and len(entries) != len(file.masters):
            raise damaged(
                path, key, f"expected one for each of {len(file.masters)} masters, got {len(entries)}"
            )
    groups, flat_groups = _groups(file, path)
    moments, scalars = _states(file, path)
    return RankState(path, file, moments, scalars, groups, flat_groups)


def _groups(file: OptimizerFile, path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the param groups without their parameters, and the group of every flat."""
    groups: list[dict[str, Any]] = []
    flat_groups: list[int] = []
    for number, group in enumerate(file.optimizer.param_groups):
        held = group.get("params")
        if not isinstance(held, list) or held != list(range(len(flat_groups), len(flat_groups) + len(held))):
            raise damaged(path, f"param_groups.{number}.params", f"expected the next flats, got {held!r:.80}")
        flat_groups += [number] * len(held)
        groups.append({key: value for key, value in group.items() if key != "params"})
    if len(flat_groups) != len(file.masters):
        raise damaged(path, "param_groups", f"have {len(flat_groups)} flat tensors of {len(file.masters)}")
    return groups, flat_groups


def _states(file: OptimizerFile, path: Path) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]:
    unknown = file.optimizer.state.keys() - set(range(len(file.masters)))
    if unknown:
        raise damaged(path, "state", f"expected {len(file.masters)} flat tensors, got {seen(unknown.pop())}")
    moments: list[dict[str, torch.Tensor]] = []
    scalars: list[dict[str, Any]] = []
    for number, master in enumerate(file.masters):
        moments.append({})
        scalars.append({})
        state = file.optimizer.state.get(number, {})
        if not isinstance(state, dict):
            raise damaged(path, f"state.{number}", f"expected a dict, got {seen(state)}")
        for key, value in state.items():
            where = f"state.{number}.{key}"
            if type(key) is not str or key in ("", "master", "buffer"):
                raise damaged(path, where, "is no name of optimizer state")
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                scalars[-1][key] = value.item() if isinstance(value, torch.Tensor) else value
            # Partitions are padded to a multiple of twice the ranks, of which the masters are saved without.
            elif is_flat(value) and 0 <= value.numel() - master.numel() < 2 * file.partition_count:
                moments[-1][key] = value
            else:
                found = f"{value.dtype} of shape {tuple(value.shape)}"
                raise damaged(path, where, f"expected the {master.numel()} floats of the master, got {found}")
    return moments, scalars
