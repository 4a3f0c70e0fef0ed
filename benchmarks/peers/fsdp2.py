"""torch's FSDP2 (`fully_shard`): float32 shards as masters, bfloat16 compute and communication."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import CLIP_NORM, adamw, backward_of
from benchmarks.peers.gathered_muon import GatheredMuon


@dataclass(frozen=True)
class FSDP2Settings:
    """Documented choices of FSDP2's users.

    ``separate_groups``: the embedding is a group, and norm and head are one, as in torchtitan. Otherwise the
    root's group has them. ``reshard_last_layer``: False leaves the parameters of the last layer, which
    backward needs first. ``forward_prefetch`` and ``backward_prefetch``: number of layers that are gathered
    ahead explicitly, 0 leaves it to FSDP2.
    """

    separate_groups: bool = False
    reshard_last_layer: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0


class FSDP2Trainer:
    """One group per decoder layer and one for the rest, as FSDP2's own examples shard a transformer.

    reshard_after_forward: True frees a layer's parameters after its forward (the counterpart of stage 3),
    False keeps them until backward (the counterpart of stage 2). settings: those of FSDP2Settings.
    """

    def __init__(
        self,
        shape: Shape,
        reshard_after_forward: bool,
        rule: str = "adamw",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = build_model(shape).float()
        _shard(self.model, reshard_after_forward, FSDP2Settings(**(settings or {})))
        muon = rule == "muon"
        self.optimizer = GatheredMuon(self.model) if muon else adamw(list(self.model.parameters()))
        self.norm = torch.zeros(())

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        loss = backward_of(self.model, micro_batches, self._unsynchronized)
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        """Leave gradients unsharded, as torch's counterpart of DDP's no_sync."""
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def gradient_norm(self) -> float:
        return self.norm.full_tensor().item()  # type: ignore[attr-defined]


def _shard(model: torch.nn.Module, reshard: bool, settings: FSDP2Settings) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    layers: list[Any] = list(model.get_submodule("model.layers").children())
    for layer in layers:
        last = layer is layers[-1] and not settings.reshard_last_layer
        fully_shard(layer, reshard_after_forward=reshard and not last, **shared)
    if settings.separate_groups:
        fully_shard(model.get_submodule("model.embed_tokens"), reshard_after_forward=reshard, **shared)
        ending = [model.get_submodule("model.norm"), model.get_submodule("lm_head")]
        fully_shard(ending, reshard_after_forward=False, **shared)
    fully_shard(model, reshard_after_forward=reshard, **shared)
    for number, layer in enumerate(layers):
        if settings.forward_prefetch:
            layer.set_modules_to_forward_prefetch(layers[number + 1 :][: settings.forward_prefetch])
        if settings.backward_prefetch:
            layer.set_modules_to_backward_prefetch(layers[:number][::-1][: settings.backward_prefetch])
