"""The command line run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from zero_ext.cli import app


def run(*arguments: str, status: int = 0) -> str:
    """What ``zero-ext`` prints on both streams; it must end with ``status``."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output
