"""train_3d.py on two nodes of two ranks: network namespaces where these are permitted, else localhost."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.harness.network import ADDRESSES, EmulatedNetwork, NetworkRefused

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RANKS_PER_NODE, STEPS = 2, 8


class Nodes(NamedTuple):
    """How each node's command begins, what its environment has, and where the agents meet."""

    name: str
    prefixes: list[list[str]]
    variables: list[dict[str, str]]
    address: str
    network: EmulatedNetwork | None


@pytest.fixture
def nodes(capsys: pytest.CaptureFixture[str]) -> Iterator[Nodes]:
    """Two of them; says which kind."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(EmulatedNetwork(2, RANKS_PER_NODE))
        except NetworkRefused as refused:
            made = Nodes(f"two agents on localhost ({refused})", [[], []], [{}, {}], "localhost", None)
        else:
            # A namespace's name resolves nowhere: who hosts the rendezvous, and under which address, is said.
            variables = [
                {
                    "PET_LOCAL_ADDR": f"{ADDRESSES}.{node + 1}",
                    "PET_RDZV_CONF": f"is_host={int(node == 0)}",
                    "GLOO_SOCKET_IFNAME": network.environment(0)["GLOO_SOCKET_IFNAME"],
                }
                for node in range(2)
            ]
            prefixes = [network.prefix(node * RANKS_PER_NODE) for node in range(2)]
            made = Nodes("two network namespaces", prefixes, variables, f"{ADDRESSES}.1", network)
        with capsys.disabled():
            print(f"\ntwo nodes: {made.name}")
        yield made


def losses_of_one_process(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script, steps = (importlib.import_module(name) for name in ("train_3d", "demo_3d.steps"))
    settings = script.settings_of(STEPS)
    alone = steps.OneProcess(settings)
    return [alone.step(*batch).loss for batch in steps.batches(settings, steps.text_of(*script.TEXT))]


def test_two_nodes_train_as_one_process(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))}
    common = {
        **plain,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHON": sys.executable,
        "RANKS_PER_NODE": str(RANKS_PER_NODE),
        "PORT": str(port),
    }
    script = [str(EXAMPLES / "train_3d.py"), "--pp", "2", "--stage", "3", "--steps", str(STEPS)]
    started = [
        subprocess.Popen(
            [*prefix, str(EXAMPLES / "multi_node" / "node.sh"), "2", nodes.address, *script],
            env={**common, **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for prefix, variables in zip(nodes.prefixes, nodes.variables, strict=True)
    ]
    try:
        wanted = losses_of_one_process(monkeypatch)
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    found = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", "\n".join(said), re.MULTILINE)]
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, rel=1e-5, abs=0)
    assert min(found) < found[0]
    if nodes.network is not None:
        assert all(nodes.network.bytes_sent(node) > 100_000 for node in range(2))
