"""The options that all programs of this folder take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch


def parse(
    description: str | None, more: Mapping[str, tuple[Callable[[str], Any], Any]] | None = None
) -> argparse.Namespace:
    """`device` (torch.device), `seconds` and `toy` of the command line; `more` options by name, each with its
    type and default."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--seconds", type=float, default=60.0, help="time to keep to")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    for name, (kind, default) in (more or {}).items():
        parser.add_argument(name, type=kind, default=default)
    return parser.parse_args()
