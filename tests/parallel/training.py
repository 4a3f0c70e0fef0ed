"""Steps of a model on a mesh, and the same steps in one process: for all kinds of parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.rank import World
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import Pipeline
from zero_ext.zero import engine_of

WORDS, LENGTH, SAMPLES, CLIP = 16, 4, 8, 0.5
# Of a model, inputs and targets.
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class StepRecords(NamedTuple):
    """Losses of the steps, and norms of the gradients before clipping."""

    losses: list[float]
    norms: list[float | None]


@functools.cache
def mesh_of(**lengths: int) -> DeviceMesh:
    """All ranks, on axes of these lengths; made once in a process."""
    return make_mesh(lengths, device_type="cpu")


def mesh_of_one() -> DeviceMesh:
    """This rank alone."""
    return DeviceMesh("cpu", torch.tensor([[dist.get_rank()]]), mesh_dim_names=("pp", "dp"))


def batches(seed: int, steps: int, samples: int = SAMPLES) -> list[torch.Tensor]:
    """Words [2, samples, LENGTH], given and wanted, for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (2, samples, LENGTH), generator=generator) for _ in range(steps)]


def mean_loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Cross entropy, a mean over all words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten())


def loss_of(model: nn.Module, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return mean_loss(model(words), wanted)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that does not make rounding large where gradients are nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


class Course:
    """A prepared model on a mesh, as a pipeline where there are ``micro_batches``, and its steps."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        config: dict[str, Any],
        loss: Loss = loss_of,
        micro_batches: int = 0,
        **settings: Any,
    ) -> None:
        config = {"gradient_clipping": CLIP, "timeout_seconds": 120.0, **config}
        self.model, self.optimizer = zero_ext.prepare(model, adamw(model), config, process_group=mesh)
        self.engine, self.mesh, self.loss = engine_of(self.model), mesh, loss
        self.pipeline = None
        if micro_batches:
            self.pipeline = Pipeline(self.model, self.optimizer, micro_batches=micro_batches, **settings)

    def own(self, samples: torch.Tensor) -> torch.Tensor:
        """This rank's share of a batch."""
        for axis in [name for name in self.mesh.mesh_dim_names or () if name in ("dp", "ep")]:
            samples = samples.chunk(self.mesh[axis].size())[self.mesh[axis].get_local_rank()]
        return samples

    def steps(self, steps: Iterable[torch.Tensor]) -> StepRecords:
        """One for each of the batches, which are those of all ranks."""
        records = StepRecords([], [])
        for words, wanted in steps:
            if self.pipeline is not None:
                loss = self.pipeline.train_batch(self.own(words), targets=self.own(wanted))
            else:
                loss = self.loss(self.model, self.own(words), self.own(wanted))
                self.model.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            records.losses.append(float(loss.detach()))
            records.norms.append(self.engine.grad_norm)
        return records


def alone(
    model: nn.Module,
    steps: Iterable[torch.Tensor],
    loss: Loss = loss_of,
    clip: float = CLIP,
    chunks: int = 1,
) -> StepRecords:
    """The same steps in one process without this project's engine. In several ``chunks``, one after the
    other, a step's samples know nothing of each other."""
    optimizer = adamw(model)
    records = StepRecords([], [])
    for words, wanted in steps:
        losses = []
        for pair in zip(words.chunk(chunks), wanted.chunk(chunks), strict=True):
            losses.append(loss(model, *pair) / chunks)
            losses[-1].backward()
        records.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        records.losses.append(float(sum(losses)))
    return records


def mean_over(world: World, values: list[float]) -> list[float]:
    return torch.tensor(world.everyone(values), dtype=torch.float64).mean(0).tolist()


def assert_same_values(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Full parameters, some of a model or all, are those of the steps in one process."""
    assert found
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_steps(found: Any, wanted: Any) -> None:
    """Losses, norms, or several of them are the same but for rounding."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
