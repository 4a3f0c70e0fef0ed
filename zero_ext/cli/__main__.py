"""``python -m zero_ext.cli``: the command where its script is not on PATH."""

from zero_ext.cli import app

app()
