"""Train with pipeline parallelism, tensor parallelism and ZeRO across replicas, on one node or several.

    torchrun --nproc-per-node 4 examples/train_3d.py --pp 2
    examples/multi_node/node.sh 2 10.0.0.1 examples/train_3d.py --pp 2 --tp 2      # on both nodes
    sbatch --export ALL,SCRIPT=examples/train_3d.py examples/slurm/train.sbatch --pp 2 --tp 2

The number of replicas is the number of ranks divided by `--pp` and `--tp`. In the mesh, `tp` varies fastest,
then `dp`, then `pp`, so the axes with the most communication stay inside a node. The model is small and
trains on CPUs. A run resumes from the newest checkpoint, which a run with other `--pp` and `--tp` may have
saved.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from demo_3d.settings import ThreeDSettings
from demo_3d.steps import ManyRanks, batches, text_of

import zero_ext
from zero_ext.parallel import make_mesh
from zero_ext.zero import engine_of

CHECKPOINTS = Path("runs") / "train-3d"
STEPS_A_CHECKPOINT = 20
TEXT = sorted(Path(__file__).parent.glob("*.py"))


def settings_of(steps: int) -> ThreeDSettings:
    """Return the settings of the 3D demonstration for the given number of steps."""
    return ThreeDSettings(steps=steps, epsilon=1e-3, learning_rate=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=60, help="total steps, including those of earlier runs")
    chosen = parser.parse_args()
    settings = settings_of(chosen.steps)

    dist.init_process_group()
    mesh = make_mesh(pp=chosen.pp, tp=chosen.tp, device_type="cpu")
    trained = ManyRanks(settings, mesh, {"stage": chosen.stage})
    engine = engine_of(trained.model)
    if CHECKPOINTS.exists():
        zero_ext.load_checkpoint(CHECKPOINTS, trained.model)
    for windows, following in islice(batches(settings, text_of(*TEXT)), engine.steps, None):
        loss = trained.step(windows, following).loss
        if dist.get_rank() == 0:
            print(f"step {engine.steps}: loss {loss:.8f}", flush=True)
        if engine.steps % STEPS_A_CHECKPOINT == 0:
            zero_ext.save_checkpoint(CHECKPOINTS, trained.model, step=engine.steps, keep_last=2).wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
