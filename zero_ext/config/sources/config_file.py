"""Configuration files as plain mappings: YAML and TOML by their suffix, and JSON."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from zero_ext.config.sources.json_file import TOO_DEEP, checked_object, parse_json_object, read_text, refusal


def read_config_file(path: str | Path) -> dict[str, object]:
    """Read a configuration file: YAML for the suffixes .yaml and .yml, TOML for .toml, else JSON.

    YAML has the scalars of its version 1.2: `1e-4` is a number, and `on` and `no` are texts.

    Raises:
        ConfigError: names the file, as `read_json_object` does; also for an anchor or a tag of YAML, and
            where the package that reads the format is not installed.
    """
    parse = _PARSERS.get(Path(path).suffix.lower(), parse_json_object)
    return parse(read_text(Path(path)), str(path))


def _parse_yaml(text: str, source: str) -> dict[str, object]:
    yaml = _installed(("yaml",), "PyYAML", "YAML", source)
    try:
        value = yaml.load(text, Loader=_yaml_loader(yaml))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise refusal(f"expected YAML, got an error{where}: {error.problem}. Correct it.", source) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise refusal(f"expected YAML, got an error: {error}. Correct it.", source) from None
    except RecursionError:
        raise refusal(TOO_DEEP, source) from None
    return checked_object({} if value is None else value, source)


def _parse_toml(text: str, source: str) -> dict[str, object]:
    toml = _installed(("tomllib", "tomli"), "tomli", "TOML", source)
    try:
        value = toml.loads(text)
    except ValueError as error:  # TOMLDecodeError is one
        raise refusal(f"expected TOML, got an error: {error}. Correct it.", source) from None
    except RecursionError:
        raise refusal(TOO_DEEP, source) from None
    return checked_object(value, source)


_PARSERS: dict[str, Callable[[str, str], dict[str, object]]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
}


def _installed(modules: tuple[str, ...], package: str, format_name: str, source: str) -> Any:
    for name in modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    problem = f"expected {package} to read {format_name}, got no such package. Install it, or write JSON."
    raise refusal(problem, source)


# The scalars of YAML 1.2's core schema that JSON has too. PyYAML's own are those of version 1.1.
_SCALARS = (
    ("null", r"(~|null|Null|NULL|)", "~nN\0"),
    ("bool", r"(true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
)


def _yaml_loader(yaml: Any) -> type[Any]:
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or event.anchor is not None or _has_own_tag(event):
                raise yaml.composer.ComposerError(
                    None, None, "an anchor, an alias or a tag", event.start_mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names: set[str] = set()
            for key, _ in node.value:
                name = self.construct_object(key, deep=True)
                if not isinstance(name, str):
                    problem = f"key {name!r}, which is no text"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                if name in names:
                    problem = f"key {name!r} twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(name)
            return dict(super().construct_mapping(node, deep=deep))

    for name, pattern, first in _SCALARS:
        letters = ["" if letter == "\0" else letter for letter in first]
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), letters)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
    return Loader


def _has_own_tag(event: Any) -> bool:
    return getattr(event, "tag", None) not in (None, "!")
