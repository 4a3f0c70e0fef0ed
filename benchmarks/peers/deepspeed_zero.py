"""DeepSpeed ZeRO 1, 2 and 3 on its CPU accelerator, with its own fused CPU Adam."""

import gc
import os
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.swap_tensor.utils import SwapBufferManager

from benchmarks.harness.ranks import free_port
from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    MUON,
    WEIGHT_DECAY,
    loss_of,
    muon_serves,
    nvme_folder,
)
from benchmarks.peers.tuned_settings import set_by_path

NEVER = 1_000_000_000
DEFAULT_BUFFER = 100_000_000


def zero_section(stage: int, optimizer: str, params: str, largest: int) -> dict:
    """The ZeRO part of the JSON: the tiers of optimizer state and parameters. Their buffers must hold the
    ``largest`` shard of a parameter, in elements; DeepSpeed's default of 1e8 stays where it does."""
    section: dict = {"stage": stage}
    if optimizer == "host":
        section["offload_optimizer"] = {"device": "cpu"}
    elif optimizer == "nvme":
        section["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme_folder()}
    if params == "nvme":
        buffer = max(DEFAULT_BUFFER, largest)
        section["offload_param"] = {"device": "nvme", "nvme_path": nvme_folder(), "buffer_size": buffer}
    return section


def optimizer_section(rule: str) -> dict:
    """The optimizer's part of the JSON. DeepSpeed's Muon marks parameters, see :class:`DeepSpeedTrainer`."""
    settings = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    if rule == "muon":
        # Its other method, the default, iterates in float32 on CPUs, which takes longer here.
        method = {"momentum": MUON["momentum"], "ns_method": "standard"}
        return {"type": "Muon", "params": {**settings, **method}}
    return {"type": "AdamW", "params": settings}


def configuration(
    stage: int,
    optimizer: str = "device",
    params: str = "device",
    largest: int = 0,
    rule: str = "adamw",
    settings: Mapping[str, Any] | None = None,
    accumulation: int = 1,
) -> dict:
    """The JSON a DeepSpeed user would write; everything unsaid keeps DeepSpeed's default. ``settings`` are
    values by the path of their key, "zero_optimization.overlap_comm"."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": NEVER,
        "bf16": {"enabled": True},
        "zero_optimization": zero_section(stage, optimizer, params, largest),
        "optimizer": optimizer_section(rule),
    }
    set_by_path(config, settings or {})
    return config


class DeepSpeedTrainer:
    """`deepspeed.initialize`, then its loop: engine(batch), engine.backward, engine.step."""

    def __init__(
        self,
        shape: Shape,
        stage: int,
        optimizer: str = "device",
        params: str = "device",
        rule: str = "adamw",
        settings: Mapping[str, Any] | None = None,
        accumulation: int = 1,
    ) -> None:
        model = build_model(shape)
        if rule == "muon":
            for name, parameter in model.named_parameters():
                parameter.use_muon = muon_serves(name, parameter)  # type: ignore[attr-defined]
        largest = max(parameter.numel() for parameter in model.parameters())
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if "WORLD_SIZE" not in os.environ:
            # Without a launcher DeepSpeed would ask MPI who it is.
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        deepspeed.init_distributed(dist_backend="gloo")
        config = configuration(stage, optimizer, params, largest, rule, settings, accumulation)
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        # The engine casts float buffers to bfloat16; the rotary ones go back to what the others compute with.
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name]

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        losses = []
        for tokens in micro_batches:
            # The engine divides the gradients by the number of micro-batches, and steps after the last.
            loss = loss_of(self.engine, tokens)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def gradient_norm(self) -> float:
        return float(self.engine.get_global_grad_norm())

    def staging_bytes(self) -> dict[str, int]:
        """Bytes of the swap buffers that this process holds, found among its live objects."""
        found = gc.get_objects()
        managers = [item for item in found if type(item) is SwapBufferManager]
        swappers = [item for item in found if type(item) is AsyncPartitionedParameterSwapper]
        tensors = [buffer for manager in managers for buffer in manager.all_buffers]
        tensors += [swapper.buffers for swapper in swappers]
        storages = [tensor.untyped_storage() for tensor in tensors]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return {"host": sum(held.values()), "device": 0}
