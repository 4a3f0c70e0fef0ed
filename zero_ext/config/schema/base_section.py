"""Base of all configuration models: frozen, strict, and refusing by key path what it cannot use.

Numbers are strict: a bool is no number, a string is no number, NaN and infinities are refused. A float with a
integral value (JSON's 5e8) is accepted where an integer is expected.
"""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import Self

from .config_errors import (
    CORRECT_IT,
    SUGGESTIONS,
    ConfigError,
    Problem,
    join_path,
    show,
    unknown_key,
    wrong_value,
)
from .type_descriptions import accepted

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
