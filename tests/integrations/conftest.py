"""Tests in the folders here need third-party packages: collected when a path below this folder is named.

``make test-integrations`` installs the packages and names the folder; the files right here need none.
"""

from __future__ import annotations

import os
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

MODULE = Path(__file__).resolve().parent
# Ray would end its workers when the tests of other processes fill 95% of the machine's memory.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the folders out of an ordinary run of the whole suite."""
    if collection_path.parent != MODULE or not collection_path.is_dir():
        return None
    named = (
        Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args
    )
    return None if any(path == MODULE or MODULE in path.parents for path in named) else True


@pytest.fixture(scope="module", autouse=True)
def no_process_group_for_other_modules() -> Iterator[None]:
    """Libraries that begin a group in this very process leave it behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_environment_for_other_tests() -> Iterator[None]:
    """Launchers of libraries leave ranks and addresses in it, from which others begin groups."""
    with unittest.mock.patch.dict(os.environ):
        yield
