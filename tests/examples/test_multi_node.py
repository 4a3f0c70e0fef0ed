"""Multi-node examples on one machine: two agents that pass for two nodes, and the dry run of a SLURM job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
MULTI_NODE = ROOT / "examples" / "multi_node"
STEPS_A_RUN = 200
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[07-10]" ]] || exit 1
printf 'node%02d\\n' 7 8 9 10
"""


def slurm_environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    """A job on four nodes of two GPUs and 24 processors each, with a stand-in for scontrol."""
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(SCONTROL)
    tool.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))}
    return {
        **plain,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "node[07-10]",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "24",
        "SLURM_SUBMIT_DIR": "/home/user/run",
        "PYTHON": "python3.11",
        "DRY_RUN": "1",
        **changes,
    }


def dry_run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        ["bash", str(SBATCH), *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_scripts_parse() -> None:
    for script in (SBATCH, *MULTI_NODE.glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_job_starts_an_agent_a_node_that_meet_on_the_first(tmp_path: Path) -> None:
    assert dry_run(slurm_environment(tmp_path), "--my-flag") == (
        "OMP_NUM_THREADS=12 srun --kill-on-bad-exit=1 python3.11 -m torch.distributed.run --nnodes 4 "
        "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node07:21234 --rdzv-id 41234 "
        "--max-restarts 0 /home/user/run/examples/plain_loop.py --my-flag"
    )
    own = {"RANKS_PER_NODE": "5", "PORT": "3333", "SCRIPT": "/mine.py", "OMP_NUM_THREADS": "1"}
    found = dry_run(slurm_environment(tmp_path, **own))
    assert found.startswith("OMP_NUM_THREADS=1 srun ") and found.endswith(" /mine.py")
    assert "--nproc-per-node 5" in found and "node07:3333" in found


def test_without_slurm_it_is_one_node(tmp_path: Path) -> None:
    job = slurm_environment(tmp_path)
    environment = {name: value for name, value in job.items() if not name.startswith("SLURM_")}
    found = dry_run(environment)
    assert "srun" not in found
    assert "--nnodes 1 --nproc-per-node 1" in found and "--rdzv-endpoint localhost:20000" in found


def test_two_agents_on_one_machine_train_jointly(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**plain, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment["PYTHON"] = sys.executable
    done = subprocess.run(
        ["bash", str(MULTI_NODE / "rehearse.sh")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS_A_RUN}: loss" in done.stdout
    saved = next((tmp_path / "runs" / "plain-loop").glob("step-*/manifest.json")).read_text()
    assert '"world_size":2' in saved.replace(" ", "")
