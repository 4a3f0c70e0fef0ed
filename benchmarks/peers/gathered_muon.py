"""Muon over FSDP2's shards by gathering: the usual recipe, every rank orthogonalizes every matrix."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks.peers.base import MUON, adamw, muon_serves


class GatheredMuon:
    """Muon for the hidden matrices of a model of DTensors sharded by rows, fused AdamW for the rest.

    The momentum is averaged on the shards. Directions are gathered in bfloat16, one matrix ahead of the one
    that torch's own Newton-Schulz works on, and each rank keeps its rows of the result.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = list(model.named_parameters())
        self.matrices = [each for name, each in named if muon_serves(name, each)]
        self.momentum = [torch.zeros_like(each.to_local()) for each in self.matrices]  # type: ignore[attr-defined]
        self.adamw = adamw([each for name, each in named if not muon_serves(name, each)])

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' gradients."""
        ahead = self._gather(0)
        for number, parameter in enumerate(self.matrices):
            gathered, ahead = ahead, self._gather(number + 1)
            update = _zeropower_via_newtonschulz(
                gathered.to_local(),  # type: ignore[union-attr]
                MUON["ns_coefficients"],
                MUON["ns_steps"],
                MUON["eps"],
            )
            local = parameter.to_local()  # type: ignore[attr-defined]
            rows = -(-update.size(0) // dist.get_world_size())
            own = update[rows * dist.get_rank() :][: local.size(0)]
            local.mul_(1 - MUON["lr"] * MUON["weight_decay"])
            local.add_(own, alpha=-_adjust_lr(MUON["lr"], MUON["adjust_lr_fn"], parameter.shape))
        self.adamw.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.matrices:
            parameter.grad = None
        self.adamw.zero_grad()

    def _gather(self, number: int) -> DTensor | None:
        if number == len(self.matrices):
            return None
        gradient = self.matrices[number].grad
        assert isinstance(gradient, DTensor)
        own = gradient.to_local().float()
        self.momentum[number].lerp_(own, 1 - MUON["momentum"])
        direction = own.lerp(self.momentum[number], MUON["momentum"]).bfloat16()
        shards = DTensor.from_local(
            direction,
            gradient.device_mesh,
            gradient.placements,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
        return shards.redistribute(placements=[Replicate()], async_op=True)
