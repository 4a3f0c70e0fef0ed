"""The command ``zero-ext``: checkpoints looked into and exported, the machine described, devices measured."""

from zero_ext.cli.app import app

__all__ = ["app"]
