"""``zero-ext run``: torchrun, and on request scripts written for DeepSpeed on zero_ext."""

from __future__ import annotations

import argparse
import sys

COMPAT = "--deepspeed-compat"
_RUNNER = "zero_ext.integrations.deepspeed.run_script"


def launch(arguments: list[str]) -> None:
    """Starts ranks as torchrun does, with all of its arguments; a collective's worth of processes.

    ``--deepspeed-compat`` before the script makes ``import deepspeed`` mean zero_ext in these processes.
    Raises ``SystemExit`` if a rank fails, after torchrun's report of it, or for wrong arguments.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = _parser(torchrun.get_args_parser()).parse_args(arguments)
    compat = parsed.deepspeed_compat
    del parsed.deepspeed_compat
    if compat:
        _through_look_alike(parsed)
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        # The ranks have printed their own tracebacks; that of the launcher would only bury them.
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def _parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.prog = "zero-ext run"
    parser.description = "Start a script on several ranks. All arguments of torchrun, and:"
    parser.add_argument(
        COMPAT,
        action="store_true",
        help="In these processes 'import deepspeed' gives zero_ext under DeepSpeed's names, so that "
        "unmodified scripts with a DeepSpeed JSON run. A DeepSpeed that is installed is left alone.",
    )
    return parser


def _through_look_alike(parsed: argparse.Namespace) -> None:
    """The same program, started by the runner."""
    if parsed.no_python:
        raise SystemExit(f"zero-ext run: {COMPAT} is for Python scripts; leave --no-python out")
    program = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    parsed.training_script_args = [*program, *parsed.training_script_args]
    parsed.training_script, parsed.module = _RUNNER, True
