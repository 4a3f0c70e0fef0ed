"""``add_config_arguments``: DeepSpeed's command-line flags."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to ``parser`` and returns it."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine; read by the script alone")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of DeepSpeed's JSON")
    return parser
