"""The ways to train a GPT on one GPU: one step each by the same recipe.

bfloat16 parameters or compute, float32 masters, AdamW, clipped to the norm of 1.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero_ext
from benchmarks.gpu.gpt import GPTShape, build
from benchmarks.harness.ranks import free_port
from benchmarks.peers.base import BETAS, CLIP_NORM, EPSILON, LEARNING_RATE, WEIGHT_DECAY, adamw, nvme_folder
from benchmarks.peers.masters import MasterWeightAdamW
from zero_ext.zero import Engine, engine_of

NEVER = 1_000_000_000


class Loop:
    """The loop that users write, over their ``model`` and ``optimizer``."""

    model: Any
    optimizer: Any

    def backward(self, ids: Tensor) -> Tensor:
        """Forward and backward; the loss."""
        loss: Tensor = self.model(ids)
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Gradients go."""
        self.optimizer.zero_grad()

    def step(self, ids: Tensor) -> Tensor:
        """A whole step; the loss."""
        loss = self.backward(ids)
        self.optimizer.step()
        self.clear()
        return loss


class Plain(Loop):
    """The plain loop, with torch's fused AdamW over float32 masters."""

    def __init__(self, shape: GPTShape, device: torch.device) -> None:
        self.model = build(shape, device, torch.bfloat16)
        self.optimizer = MasterWeightAdamW(list(self.model.parameters()))


class Fsdp2:
    """torch's FSDP2 on one rank, a group a block."""

    def __init__(self, shape: GPTShape, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        join_alone(device)
        self.model = build(shape, device, torch.bfloat16).float()
        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = adamw(list(self.model.parameters()))

    def step(self, ids: Tensor) -> Tensor:
        """A whole step; the loss."""
        loss: Tensor = self.model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class DeepSpeed:
    """DeepSpeed's stage 3 with torch's fused AdamW, or with its own on the host."""

    def __init__(self, shape: GPTShape, device: torch.device, tier: str = "device") -> None:
        join_alone(device)
        import deepspeed

        zero: dict[str, Any] = {"stage": 3}
        if tier == "host":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        arguments = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP_NORM,
            "steps_per_print": NEVER,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            **({"optimizer": {"type": "AdamW", "params": arguments}} if tier == "host" else {}),
        }
        model = build(shape, device, torch.bfloat16)
        optimizer = adamw(list(model.parameters())) if tier == "device" else None
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, ids: Tensor) -> Tensor:
        """A whole step; the loss."""
        loss: Tensor = self.engine(ids)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


class ZeroExt(Loop):
    """`prepare`, then the plain loop; `offload` is the section of the configuration."""

    def __init__(
        self, shape: GPTShape, device: torch.device, stage: int = 3, clip: float = CLIP_NORM, **offload: Any
    ) -> None:
        model = build(shape, device, torch.bfloat16)
        config = configuration(stage, clip, "fp32", offload)
        self.model, self.optimizer = zero_ext.prepare(model, adamw(list(model.parameters())), config)

    @property
    def engine(self) -> Engine:
        """What keeps the model."""
        return engine_of(self.model)


def configuration(stage: int, clip: float, moments: str, offload: dict[str, Any]) -> dict[str, Any]:
    """zero_ext's configuration; where something lives on NVMe, in the folder for that."""
    paths = {"nvme_paths": [nvme_folder()]} if "nvme" in offload.values() else {}
    return {
        "stage": stage,
        "gradient_clipping": clip,
        "precision": {"dtype": "bf16", "moments_dtype": moments},
        "offload": {**paths, **offload},
    }


def join_alone(device: torch.device) -> None:
    """A process group of this process, as torchrun would make it."""
    if dist.is_initialized():
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
