"""Peak memory of a rank of zero_ext before anything runs: the formulas of `zero_ext.plan` and activations."""

from dataclasses import dataclass

import torch

from benchmarks.harness.activations import activation_bytes
from benchmarks.harness.shapes import LlamaShape, build_model
from benchmarks.peers import contender_named
from benchmarks.peers.base import adamw
from benchmarks.peers.zero_ext_engine import configuration
from zero_ext.config import load_config
from zero_ext.plan import StateBytes, TrainingState, model_staging, model_state_bytes


@dataclass(frozen=True)
class Prediction:
    """Bytes of a rank: model state wherever it lives, that of it in memory, and what a step needs beside.

    ``staging`` as ``prepare`` allocates it; ``activations`` of one micro-batch as PyTorch alone keeps them,
    measured on a few layers; ``gradient``, the largest of a parameter, which autograd hands over in memory of
    its own.
    """

    state: StateBytes
    state_in_memory: int
    staging: int
    activations: int
    gradient: int

    @property
    def memory(self) -> int:
        """All of what is in memory; interpreter and libraries come on top."""
        return self.state_in_memory + self.staging + self.activations + self.gradient


def predict(shape: LlamaShape, key: str) -> Prediction:
    """What the contender ``key``, one of zero_ext's with bfloat16 parameters, needs to train ``shape``."""
    contender = contender_named(key)
    options = dict(contender.options)
    stage, tiles = int(options.pop("stage")), int(options.pop("tiles", 0))
    frugal, moments = bool(options.pop("frugal", False)), str(options.pop("moments", "fp32"))
    config = configuration(stage, tiles, frugal, moments, {kind: str(tier) for kind, tier in options.items()})
    with torch.device("meta"):
        model = build_model(shape)
    staging = model_staging(model, adamw(list(model.parameters())), config, contender.ranks)
    state = model_state_bytes(
        stage, contender.ranks, TrainingState(trainable={"bf16": shape.parameters}, moments_dtype=moments)
    )
    offload = load_config(config).offload
    in_memory = {"params": state.params, "grads": 0 if frugal else state.grads, "optimizer": state.optimizer}
    return Prediction(
        state,
        sum(nbytes for kind, nbytes in in_memory.items() if getattr(offload, kind) != "nvme"),
        staging.total,
        activation_bytes(shape),
        2 * max(parameter.numel() for parameter in model.parameters()),
    )
