"""Training steps of the model in one process, and the same steps in a layout of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from zero_ext.parallel.pipeline import Pipeline, PipelineModule, TiedLayerSpec, layer_seed
from zero_ext.zero import engine_of

from .model import Bytes, apply_tensor_parallel, layers, loss, score
from .settings import ThreeDSettings


def text_of(*files: Path) -> Tensor:
    """Return the bytes of `files`, uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(settings: ThreeDSettings, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of every step, int64 [batch, window], from `text`, uint8 [bytes]."""
    length = settings.window + 1
    windows = text[: text.numel() // length * length].view(-1, length)
    drawn = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        chosen = windows[torch.randint(len(windows), (settings.batch,), generator=drawn)].to(torch.int64)
        yield chosen[:, :-1], chosen[:, 1:]


class Step(NamedTuple):
    """Mean loss of a batch, and the norm of its gradient before clipping."""

    loss: float
    norm: float


class OneProcess:
    """The plain loop in one process, without the zero_ext engine."""

    def __init__(self, settings: ThreeDSettings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        # The last layer reuses the first one. The others are initialized with the seeds that a pipeline uses.
        specified = [
            each for each in layers(settings) if not isinstance(each, TiedLayerSpec) or each.forward is None
        ]
        self.layers = nn.ModuleList(each.build(layer_seed(number)) for number, each in enumerate(specified))
        self.optimizer = _optimizer(self.layers, settings)

    def step(self, windows: Tensor, following: Tensor) -> Step:
        """Train on one batch and return its loss and gradient norm."""
        hidden = windows
        for layer in self.layers:
            hidden = layer(hidden)
        embedding = self.layers[0]
        assert isinstance(embedding, Bytes)
        value = loss(score(embedding, hidden), following)
        value.backward()
        norm = nn.utils.clip_grad_norm_(self.layers.parameters(), self.settings.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(value.item(), norm.item())


class ManyRanks:
    """Training with pipeline parallelism, tensor parallelism and ZeRO, in the layout of `mesh`.

    Args:
        settings: Shape of the model and hyperparameters, including gradient clipping.
        mesh: Mesh with the axes "pp", "dp" and "tp".
        config: The zero_ext configuration, without clipping.
    """

    def __init__(self, settings: ThreeDSettings, mesh: DeviceMesh, config: dict[str, Any]) -> None:
        torch.manual_seed(settings.seed)
        module = PipelineModule(layers(settings), mesh, loss=loss)
        apply_tensor_parallel(module, mesh)
        config = {**config, "gradient_clipping": settings.clipping}
        self.model, self.optimizer = zero_ext.prepare(
            module, _optimizer(module, settings), config, process_group=mesh
        )
        self.pipeline = Pipeline(self.model, self.optimizer, micro_batches=settings.micro_batches)
        replicas = mesh["dp"]
        share = settings.batch // replicas.size()
        self.own = slice(share * replicas.get_local_rank(), share * (replicas.get_local_rank() + 1))

    def step(self, windows: Tensor, following: Tensor) -> Step:
        """Train on this replica's share of a batch and return loss and norm of the full batch."""
        loss = self.pipeline.train_batch(windows[self.own], targets=following[self.own])
        return Step(loss.item(), float(engine_of(self.model).grad_norm or 0.0))


def _optimizer(module: nn.Module, settings: ThreeDSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=settings.learning_rate, eps=settings.epsilon)
