"""Start the runs of a demonstration as separate processes, with torchrun if there are several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent


def launch(module: str, ranks: int, *arguments: object) -> None:
    """Run `python -m module arguments` on `ranks` ranks that share all cores, and wait.

    Raises:
        subprocess.CalledProcessError: A rank failed. Its own message is on stderr.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // ranks)
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads are slow when other processes use the cores
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", module, *map(str, arguments)]
    subprocess.run(command, env=environment, check=True)
