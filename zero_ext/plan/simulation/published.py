"""Published runs, simulated: figures of ZeRO's papers and posts next to the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_ext.plan.simulation.hardware import MACHINES
from zero_ext.plan.simulation.simulate import Simulation, fastest_placements, simulate
from zero_ext.plan.simulation.training_setup import Training
from zero_ext.plan.simulation.transformer_cost import TRANSFORMERS, Transformer

AZURE = "DeepSpeed post of 2022-07-26 (Azure)"


@dataclass(frozen=True)
class Published:
    """One reported run.

    Attributes:
        what: for tables.
        source: where it is reported.
        teraflops: TFLOP/s of a GPU, recomputed FLOPs included.
        machine: its key in `MACHINES`.
        shape: the model.
        training: how it was trained.
        fitted: the machine's matrix efficiency was chosen by this run, so that its error says nothing.
        assumed: what the source does not say, and what was taken; empty if nothing.
    """

    what: str
    source: str
    teraflops: float
    machine: str
    shape: Transformer
    training: Training
    fitted: bool = False
    assumed: str = ""


@dataclass(frozen=True)
class Comparison:
    """A published run and its simulation.

    Attributes:
        run: the published run.
        simulation: its simulation.
    """

    run: Published
    simulation: Simulation

    @property
    def error(self) -> float:
        """Simulated over published, less 1."""
        return self.simulation.flops_per_second / (1e12 * self.run.teraflops) - 1


def _offload(world_size: int, micro_batch: int) -> Training:
    return Training(
        world_size,
        micro_batch=micro_batch,
        grads="host",
        optimizer="host",
        activations="recomputed_host",
        # No limit: DeepSpeed counts single layers, this engine blocks, which have billions of elements here.
        max_live_elements=1 << 40,
    )


_GPT = TRANSFORMERS
PUBLISHED = (
    Published(
        "Megatron-LM, 1.2B, one V100",
        "arXiv 1909.08053, abstract; sizes from its section 5",
        39.0,
        "dgx2-v100",
        _GPT["gpt-1.2b"],
        Training(1, stage=0, micro_batch=8),
        fitted=True,
    ),
    Published(
        "ZeRO-Offload, 10B, one V100",
        "arXiv 2101.06840, abstract; sizes and batch of 10 from DeepSpeed's ZeRO-Offload tutorial",
        40.0,
        "dgx2-v100",
        _GPT["gpt-10b"],
        Training(1, stage=2, micro_batch=10, grads="host", optimizer="host"),
        assumed="no accumulation",
    ),
    Published(
        "ZeRO-3 Offload, 1T, 512 V100",
        "DeepSpeed post of 2021-03-08; 25 PFLOP/s in all, as in arXiv 2104.07857, abstract",
        49.0,
        "dgx2-v100",
        replace(_GPT["gpt-1t"], tiles=12),  # 8 would leave no memory for the next one
        _offload(512, 5),
        assumed="batch of 5 a GPU, layers in 12 tiles instead of 4-way tensor parallelism",
    ),
    Published(
        "DeepSpeed ZeRO-3, 530B, 1,024 A100",
        AZURE,
        171.37,
        "dgx-a100",
        _GPT["gpt-530b"],
        _offload(1024, 8),
        fitted=True,
        assumed="batch of 8",
    ),
    Published(
        "DeepSpeed ZeRO-3, 1T, 1,024 A100", AZURE, 165.36, "dgx-a100", _GPT["gpt-1t"], _offload(1024, 8)
    ),
    Published(
        "DeepSpeed ZeRO-3, 2T, 1,024 A100", AZURE, 157.0, "dgx-a100", _GPT["gpt-2t"], _offload(1024, 8)
    ),
    Published(
        "DeepSpeed ZeRO-3, 175B, 512 tokens, 256 A100",
        AZURE,
        204.49,
        "dgx-a100",
        replace(_GPT["gpt-175b"], sequence=512),
        _offload(256, 32),
    ),
)
"""Published runs, for `compare_published`."""


def compare_published(runs: Sequence[Published] = PUBLISHED) -> list[Comparison]:
    """Simulate published runs.

    Args:
        runs: default all of `PUBLISHED`.

    Returns:
        A comparison per run.
    """
    return [Comparison(run, simulate(run.shape.cost(), run.training, MACHINES[run.machine])) for run in runs]


def scaling(
    shape: Transformer, machine: str, world_sizes: Sequence[int], micro_batch: int = 1
) -> list[Simulation]:
    """Return the fastest placement that fits at each world size, with the same batch per GPU (weak scaling).

    Args:
        shape: the model.
        machine: its key in `MACHINES`.
        world_sizes: numbers of ranks.
        micro_batch: samples of a rank's forward.

    Returns:
        A simulation per world size; those at which nothing fits are left out.
    """
    model, found = shape.cost(), []
    for world_size in world_sizes:
        plans = fastest_placements(model, Training(world_size, micro_batch=micro_batch), MACHINES[machine])
        found += plans[:1]
    return found
