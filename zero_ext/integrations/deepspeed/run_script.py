"""Runs a script, or with ``-m`` a module, in which ``import deepspeed`` gives zero_ext.

``zero-ext run --deepspeed-compat`` starts this file on every rank, by its path and not with ``python -m``.
That would put the working folder first in ``sys.path``, and a ``torch.py`` or ``json.py`` there would run
instead of the real one before the script has started.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The entry of this file's own folder, whose modules must not be found by their bare names.
    sys.path.pop(0)


def main(arguments: list[str]) -> None:
    """Run `arguments` as the interpreter would.

    Args:
        arguments: a script or, after ``-m``, a module, then its own arguments.

    Raises:
        SystemExit: there is none.
    """
    # Only now, with a path that holds neither this file's folder nor the working folder.
    import runpy
    from pathlib import Path

    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest:
        raise SystemExit("usage: run_script [-m module | script.py] arguments...")
    root = str(Path(__file__).resolve().parents[3])
    if root not in sys.path:
        # A checkout that is not installed.
        sys.path.append(root)
    from zero_ext.integrations.deepspeed.look_alike import activate

    activate()
    sys.argv = rest
    folder = Path.cwd() if as_module else Path(rest[0]).resolve().parent
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(folder))
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
