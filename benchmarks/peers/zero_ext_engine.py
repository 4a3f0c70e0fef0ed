"""zero_ext stages 0 to 3: `prepare`, then the plain loop."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import zero_ext
from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    MUON,
    WEIGHT_DECAY,
    adamw,
    backward_of,
    muon_serves,
    nvme_folder,
)
from zero_ext.comm import process_group
from zero_ext.comm.transport import PointToPointTransport, ProcessGroupTransport
from zero_ext.zero import engine_of


class ZeroExtTrainer:
    """The loop of the README: the optimizer is the user's AdamW.

    ``tiers`` by state kind. ``tiles`` cut embedding and output layer, 0 leaves them whole. ``frugal`` is for
    models larger than memory: initialized in their tier, updated inside backward, unclipped. ``long`` is for
    long sequences: blocks are checkpointed to NVMe, loss and MLP are computed in chunks. ``transport``
    "gloo" sends bulk data through ``torch.distributed``'s group, as where ranks may not read each other's
    memory, "direct" as the library chooses. ``accumulation`` is the number of micro-batches of a step, the
    gradients of which are sent once.
    """

    def __init__(
        self,
        shape: Shape,
        stage: int,
        tiles: int = 0,
        frugal: bool = False,
        moments: str = "fp32",
        transport: str = "direct",
        rule: str = "adamw",
        long: bool = False,
        accumulation: int = 1,
        **tiers: str,
    ) -> None:
        if transport == "gloo":
            process_group.fastest_host_transport = _through_group
        config = configuration(stage, tiles, frugal, moments, tiers)
        if accumulation > 1:
            config["batch"] = {"gradient_accumulation_steps": accumulation}
        if long:
            config |= {"loss": {"chunk_tokens": "auto"}, "mlp": {"chunk_tokens": "auto"}}
            config["activation_checkpointing"] = {"tier": "nvme", "nvme_paths": [nvme_folder()]}
        with zero_ext.Init(config) if frugal else contextlib.nullcontext():
            model = build_model(shape)
        if long:
            _checkpoint_blocks(model)
        optimizer = _muon(model) if rule == "muon" else adamw(list(model.parameters()))
        self.model, self.optimizer = zero_ext.prepare(model, optimizer, config=config)

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        loss = backward_of(self.model, micro_batches, self.model.no_sync)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self) -> None:
        """The model goes, and its files with it."""
        del self.model, self.optimizer

    def gradient_norm(self) -> float:
        return norm_of(self.model)

    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters that one step makes present: twice where they are sharded, else once,
        after the step."""
        units = engine_of(self.model).units
        return sum(unit.layout.nbytes * (2 if unit.placement.params else 1) for unit in units)

    def staging_bytes(self) -> dict[str, int]:
        engine = engine_of(self.model)
        held = engine.tiers.staging_bytes()
        return {"host": held["host"], "device": held["device"] + engine.pool.total_bytes}

    def memory_breakdown(self) -> dict[str, int]:
        return dict(engine_of(self.model).memory_breakdown())


def norm_of(model: torch.nn.Module) -> float:
    """Global gradient norm of the last step of a prepared model, before clipping."""
    norm = engine_of(model).grad_norm
    if norm is None:
        raise RuntimeError("nothing asked for the gradient norm, as without clipping")
    return norm


def _muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    for name, parameter in model.named_parameters():
        parameter.use_muon = muon_serves(name, parameter)  # type: ignore[attr-defined]
    rest = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    return zero_ext.Muon(model.parameters(), **MUON, adamw=rest)


def _checkpoint_blocks(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = zero_ext.checkpoint_activations


def _through_group(group: dist.ProcessGroup, timeout_seconds: float) -> PointToPointTransport:
    """Return what the library falls back to where ranks may not read each other's memory."""
    return ProcessGroupTransport(group)


def configuration(
    stage: int, tiles: int, frugal: bool, moments: str, tiers: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration of :class:`ZeroExtTrainer`, of the same arguments."""
    offload: dict[str, Any] = {**tiers, "update_mode": "in_backward" if frugal else "after_backward"}
    if "nvme" in tiers.values():
        offload["nvme_paths"] = [nvme_folder()]
    return {
        "stage": stage,
        "gradient_clipping": 0.0 if frugal else CLIP_NORM,
        "precision": {"dtype": "bf16", "moments_dtype": moments},
        "units": {
            "persistence_threshold": 0,
            "tiles": {"Embedding": tiles, "lm_head": tiles} if tiles else {},
        },
        "offload": offload,
    }
