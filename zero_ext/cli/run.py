"""``zero-ext run``: torchrun, and on request scripts written for DeepSpeed on zero_ext."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

COMPAT = "--deepspeed-compat"
# Its path: "python -m" would look for zero_ext, torch and all else in the working folder first.
_RUNNER = Path(__file__).resolve().parents[1] / "integrations" / "deepspeed" / "run_script.py"


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
    _check_ranks(parsed.nproc_per_node)
    _check_program(parsed)
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


def _check_ranks(wanted: str) -> None:
    """``SystemExit`` for a number of ranks that torchrun would answer with a traceback of its own."""
    from torch.distributed.run import determine_local_world_size

    try:
        number = determine_local_world_size(wanted)
    except ValueError as error:
        # For words it knows, the machine lacks what they ask for, and torchrun's reason says so.
        wants = "a number of at least 1, or auto, cpu or gpu"
        raise SystemExit(
            f"zero-ext run: --nproc-per-node: got {wanted!r}, wanted {wants} ({error})"
        ) from None
    if number < 1:
        raise SystemExit(f"zero-ext run: --nproc-per-node: got {wanted!r}, wanted at least 1")


def _check_program(parsed: argparse.Namespace) -> None:
    """``SystemExit`` for a program that is not there, before any rank starts; what a rank alone can know is
    left to it."""
    name = parsed.training_script
    if parsed.no_python:
        return
    if parsed.module:
        top = name.partition(".")[0]
        sys.path.insert(0, str(Path.cwd()))  # where "python -m" looks first
        try:
            found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path.pop(0)
        if not found:
            raise SystemExit(f"zero-ext run: -m {name}: no module {top!r} here or installed; check the name")
        return
    path = Path(name)
    if not path.exists():
        raise SystemExit(f"zero-ext run: {name}: no such script (looked from {Path.cwd()}); check the path")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise SystemExit(f"zero-ext run: {name}: a folder without __main__.py; name the script in it")


def _through_look_alike(parsed: argparse.Namespace) -> None:
    """The same program, started by the runner."""
    if parsed.no_python:
        raise SystemExit(f"zero-ext run: {COMPAT} is for Python scripts; leave --no-python out")
    program = ["-m", parsed.training_script] if parsed.module else [parsed.training_script]
    parsed.training_script_args = [*program, *parsed.training_script_args]
    parsed.training_script, parsed.module = str(_RUNNER), False
