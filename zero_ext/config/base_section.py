"""Base of all configuration models: frozen, strict, and refusing by key path what it cannot use.

Numbers are strict: a bool is no number, a string is no number, NaN and infinities are refused. A float with a
integral value (JSON's 5e8) is accepted where an integer is expected."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MultipleOf
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from typing_extensions import Self, TypeIs

from zero_ext.config.config_errors import (
    CORRECT_IT,
    SUGGESTIONS,
    ConfigError,
    Problem,
    join_path,
    show,
    unknown_key,
    wrong_value,
)

LARGEST_COUNT = 2**62


def as_integer(value: object) -> object:
    """Turn a float with an integral value into an int; leave all else for the strict check that follows."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def as_tuple(value: object) -> object:
    """Turn a list (what JSON has) into a tuple (what a frozen model holds)."""
    return tuple(value) if isinstance(value, list) else value


Count = Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, BeforeValidator(as_integer), Field(ge=1, le=LARGEST_COUNT)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]


@dataclass(frozen=True, eq=False)
class KeyOf:
    """A name in ``table``, to which names may be added later."""

    table: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, source: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        return {**handler(source), "enum": list(self.table)}

    def _known(self, value: object) -> object:
        if not isinstance(value, str) or value not in self.table:
            raise ValueError(wrong_value(one_of(tuple(self.table)), value))
        return value


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _SectionMeta(ModelMetaclass):
    """Makes direct construction raise ConfigError, so that every route to a model words its errors alike."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: object, **kwargs: object) -> ConfigSection:
            if args:
                raise TypeError(
                    f"{cls.__name__}: expected keyword arguments, got {show(args[0])}. Pass key=value, or "
                    "call from_mapping."
                )
            try:
                return super().__call__(**kwargs)
            except ValidationError as error:
                raise _config_error(cls, error) from None


class ConfigSection(BaseModel, metaclass=_SectionMeta):
    """A frozen group of settings. Unknown keys and wrong values raise ConfigError with the key path."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )

    @classmethod
    def from_mapping(cls, values: object) -> Self:
        """Build from a plain mapping (as read from JSON). Raises ConfigError listing every problem."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _config_error(cls, error) from None

    def replace(self, **changes: object) -> Self:
        """Return a copy with some settings changed, checked as a new one would be."""
        said = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).from_mapping({**said, **changes})

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-able mapping; `from_mapping` returns an equal section."""
        return self.model_dump(mode="json")


def section_type(annotation: object) -> type[ConfigSection] | None:
    """Return the section class in a field's annotation (`Section`, `Section | None`), or None."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            found = section_type(member)
            if found is not None:
                return found
    return None


def key_paths(model: type[ConfigSection], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key path of a model with its pydantic field, depth first, groups before their keys."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        path = join_path(prefix, name)
        found[path] = field
        inner = section_type(field.annotation)
        if inner is not None:
            found.update(key_paths(inner, path))
    return found


class KeyProblem(ValueError):
    """Raised by validators to name a key below (or next to) the one they check; an empty path is that one."""

    def __init__(self, path: str, text: str) -> None:
        self.problem = Problem(path, text)
        super().__init__(str(self.problem))


def _config_error(model: type[ConfigSection], error: ValidationError) -> ConfigError:
    known = key_paths(model)
    problems = [
        _problem(details, known, number < SUGGESTIONS) for number, details in enumerate(error.errors())
    ]
    return ConfigError(problems, model.__name__)


def _problem(details: ErrorDetails, known: dict[str, FieldInfo], suggests: bool) -> Problem:
    path = join_path("", *details["loc"])
    kind = details["type"]
    if kind == "extra_forbidden":
        return unknown_key(path, known, suggests)
    if kind == "missing":
        return Problem(path, f"the required key is missing. Set it to {accepted(known[path])}.")
    if kind == "value_error":
        error = details["ctx"]["error"]
        if isinstance(error, KeyProblem):
            full = ".".join(filter(None, (path, error.problem.path)))
            return Problem(full, error.problem.text)
        return Problem(path, str(error))
    owner = path
    while owner not in known and owner:
        owner = owner.rpartition(".")[0]
    if owner in known:
        wanted = accepted(known[owner])
        if kind == "less_than_equal" and "of at least" in wanted:
            wanted += f", at most {details['ctx']['le']}"
        return Problem(path, wrong_value(wanted, details["input"]))
    return Problem(path, f"got {show(details['input'])}: {details['msg']}. {CORRECT_IT}")


def is_number(value: object) -> TypeIs[int | float]:
    """Return whether `value` is a finite int or float that a float64 can hold. A bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


_MANY = 2**53


def one_of(values: tuple[object, ...]) -> str:
    """Return `'a', 'b' or 'c'`."""
    words = [repr(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def accepted(field: FieldInfo) -> str:
    """Return what a field accepts, such as "an integer from 0 to 3" or "a number above 0, or null"."""
    return _words(field.annotation, tuple(field.metadata))


def _words(annotation: Any, metadata: tuple[Any, ...]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], metadata + tuple(annotation.__metadata__))
    if origin is Literal:
        return one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        members = [_words(member, metadata) for member in arguments if member is not type(None)]
        return " or ".join(members) + (", or null" if type(None) in arguments else "")
    if origin is tuple:
        inner = typing.get_args(arguments[0])[0] if arguments else str
        return "a list of integers" if inner is int else "a list of non-empty strings"
    if origin is dict:
        return "a mapping"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        tables = [item.table for item in metadata if isinstance(item, KeyOf)]
        return one_of(tuple(tables[0])) if tables else "a non-empty string"
    if annotation in (int, float):
        return ("an integer" if annotation is int else "a finite number") + _limits(metadata)
    return f"a mapping with keys {', '.join(annotation.model_fields)}"


def _limits(metadata: tuple[Any, ...]) -> str:
    low, high, above, step = -math.inf, math.inf, False, ""
    for item in _flat(metadata):
        if isinstance(item, Ge | Gt):
            bound = float(typing.cast(float, item.ge if isinstance(item, Ge) else item.gt))
            if bound >= low:
                low, above = bound, isinstance(item, Gt)
        elif isinstance(item, Le):
            high = min(high, float(typing.cast(float, item.le)))
        elif isinstance(item, MultipleOf):
            step = f", a multiple of {item.multiple_of}"
    if above:
        start = f" above {low:.10g}"
        return (start if high >= _MANY else f"{start} and at most {high:.10g}") + step
    return (f" of at least {low:.10g}" if high >= _MANY else f" from {low:.10g} to {high:.10g}") + step


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return found
