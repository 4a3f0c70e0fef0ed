"""Runs a script, or with ``-m`` a module, that finds zero_ext under ``import deepspeed``.

``python -m zero_ext.integrations.deepspeed.run_script script.py arguments...``, as ``zero-ext run
--deepspeed-compat`` does on every rank.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zero_ext.integrations.deepspeed.look_alike import activate


def main(arguments: list[str]) -> None:
    """Runs ``arguments`` as the interpreter would; ``SystemExit`` without any."""
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest:
        raise SystemExit("usage: run_script [-m module | script.py] arguments...")
    activate()
    sys.argv = rest
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
