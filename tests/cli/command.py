"""The command line run in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from zero_ext.cli import app


def invoke(*arguments: str, status: int = 0) -> Result:
    """Run ``zero-ext``, which must end with ``status``."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result


def run(*arguments: str, status: int = 0) -> str:
    """What ``zero-ext`` prints on both streams; it must end with ``status``."""
    return invoke(*arguments, status=status).output


def run_json(*arguments: str, status: int = 0) -> Any:
    """Return what ``zero-ext`` prints on stdout as JSON, which must be all of it."""
    return json.loads(invoke(*arguments, status=status).stdout)
