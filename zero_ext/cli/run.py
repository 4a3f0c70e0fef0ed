"""``zero-ext run``: torchrun, and on request scripts on zero_ext that were written without it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import zero_ext_import_hooks as hooks
from zero_ext.cli.console import NEGATIVE, WRONG_USAGE
from zero_ext.config import ConfigError
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.sources.environment_settings import VARIABLE, environment_settings

COMPAT = "--deepspeed-compat"
CONFIG = "--config"
EXAMPLES = """Examples:
  zero-ext run --standalone --nproc-per-node 2 --config config.json train.py --lr 0.1
  zero-ext run --standalone --nproc-per-node 2 --deepspeed-compat train.py --lr 0.1
"""


def launch(arguments: list[str]) -> None:
    """Start ranks as torchrun does, with all of its arguments.

    ``--deepspeed-compat`` before the script makes ``import deepspeed`` mean zero_ext in these processes and
    in those that they start, ``--config FILE`` every Trainer and every Accelerator shard their models.
    ``--deepspeed-compat -- COMMAND`` and ``--config FILE -- COMMAND`` run a launcher so instead, once.

    Raises:
        SystemExit: a rank failed, after torchrun's report of it (1), or the arguments are wrong (2).
    """
    command = _other_launcher(arguments)
    if command is not None:
        _become(command)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = _parser(torchrun.get_args_parser()).parse_args(arguments)
    own = argparse.Namespace(**{name: vars(parsed).pop(name) for name in ("deepspeed_compat", "config")})
    _check_ranks(parsed.nproc_per_node)
    _check_program(parsed)
    _export_options(own)
    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        # The ranks have printed their own tracebacks; that of the launcher would only bury them.
        print(error, file=sys.stderr)
        raise SystemExit(NEGATIVE) from None


def _other_launcher(arguments: list[str]) -> list[str] | None:
    """Return what follows "--" where nothing but this command's own options precedes it, after acting on
    these; else None."""
    if "--" not in arguments:
        return None
    end = arguments.index("--")
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    _add_options(parser)
    try:
        own, others = parser.parse_known_args(arguments[:end])
    except argparse.ArgumentError:
        return None
    if others or not (own.deepspeed_compat or own.config):
        return None
    _export_options(own)
    return arguments[end + 1 :]


def _export_options(own: argparse.Namespace) -> None:
    """Have the options act in all processes that this one starts."""
    if own.deepspeed_compat:
        _export(hooks.VARIABLE, COMPAT)
    if own.config is not None:
        _export_config(own.config)


def _wrong_usage(message: str) -> SystemExit:
    """Print what is wrong with the arguments, and return the exit for it."""
    print(f"zero-ext run: {message}", file=sys.stderr)
    return SystemExit(WRONG_USAGE)


def _parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.prog = "zero-ext run"
    parser.description = "How do I start my script on several ranks? All arguments of torchrun work, and:"
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        COMPAT,
        action="store_true",
        help="In these processes 'import deepspeed' gives zero_ext under DeepSpeed's names, so that "
        "unmodified scripts with a DeepSpeed JSON run. A DeepSpeed that is installed is left alone. "
        f"'{COMPAT} -- accelerate launch script.py' does the same for the ranks of another launcher.",
    )
    parser.add_argument(
        CONFIG,
        metavar="FILE",
        help="In these processes every Trainer of transformers (TRL's too) and every Accelerator shards its "
        "models as this configuration says, in zero_ext's keys or DeepSpeed's, so that unmodified scripts "
        "train sharded. "
        f"'{CONFIG} FILE -- accelerate launch script.py' does the same for the ranks of another launcher.",
    )


def _check_ranks(wanted: str) -> None:
    """``SystemExit`` for a number of ranks that torchrun would answer with a traceback of its own."""
    from torch.distributed.run import determine_local_world_size

    try:
        number = determine_local_world_size(wanted)
    except ValueError as error:
        # For words it knows, the machine lacks what they ask for, and torchrun's reason says so.
        choices = "a number of at least 1, or auto, cpu or gpu"
        raise _wrong_usage(f"--nproc-per-node: expected {choices}, got {wanted!r} ({error})") from None
    if number < 1:
        raise _wrong_usage(f"--nproc-per-node: expected at least 1, got {wanted!r}")


def _check_program(parsed: argparse.Namespace) -> None:
    """Raise ``SystemExit`` for a program that is not there, before any rank starts. Ranks check the rest."""
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
            raise _wrong_usage(f"-m {name}: no module {top!r} here or installed; check the name")
        return
    path = Path(name)
    if not path.exists():
        raise _wrong_usage(f"{name}: no such script (looked from {Path.cwd()}); check the path")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise _wrong_usage(f"{name}: a folder without __main__.py; name the script in it")


def _export(variable: str, option: str) -> None:
    """Have the import hook of ``variable`` act in all processes that this one starts. ``SystemExit`` where
    Python does not start with it, which would go unnoticed."""
    os.environ[variable] = "1"
    code = f"import sys; sys.exit({hooks.__name__!r} not in sys.modules)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        raise SystemExit(
            f"zero-ext run: {option}: expected {hooks.__name__}.pth in a site folder of {sys.executable}, "
            "got none. Install zero_ext with pip ('pip install -e .' in a checkout)."
        )


def _export_config(path: str) -> None:
    """Have every Trainer and Accelerator shard its models as the file ``path`` says. ``SystemExit`` if it
    cannot be read, or the environment names another one."""
    file = Path(path).absolute()
    try:
        known = environment_settings().file
        if known is not None and Path(known).absolute() != file:
            raise _wrong_usage(f"{CONFIG}: expected one file, got {path}, and {known} in {VARIABLE}")
        read_config_file(file)
    except ConfigError as error:
        raise _wrong_usage(f"{CONFIG}: {error}") from None
    if known is None:
        os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {shlex.quote(str(file))}".strip()
    _export(hooks.TRAINERS_VARIABLE, CONFIG)


def _become(command: list[str]) -> NoReturn:
    """Run a command that starts its ranks itself in the place of this process."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        got = repr(command[0]) if command else "nothing"
        raise _wrong_usage(
            "--: expected a command such as 'accelerate launch script.py', got "
            f"{got}. Leave '--' out to start ranks of a Python script."
        )
    sys.stdout.flush()
    os.execv(program, command)
