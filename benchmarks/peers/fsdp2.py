"""torch's FSDP2 (`fully_shard`): float32 shards as masters, bfloat16 compute and communication."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import CLIP_NORM, adamw, loss_of
from benchmarks.peers.gathered_muon import GatheredMuon


class FSDP2Trainer:
    """One group per decoder layer and one for the rest, as FSDP2's own examples shard a transformer.

    reshard_after_forward: True frees a layer's parameters after its forward (the counterpart of stage 3),
    False keeps them until backward (the counterpart of stage 2).
    """

    def __init__(self, shape: Shape, reshard_after_forward: bool, rule: str = "adamw") -> None:
        self.model = build_model(shape).float()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self.model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        muon = rule == "muon"
        self.optimizer = GatheredMuon(self.model) if muon else adamw(list(self.model.parameters()))
        self.norm = torch.zeros(())

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        return self.norm.full_tensor().item()  # type: ignore[attr-defined]
