"""A plan as a configuration that trains so."""

from __future__ import annotations

from typing import Any

from zero_ext.config import UnitConfig, ZeroConfig
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.training_setup import Training

DEFAULT_NVME_PATH = "/nvme"


def config_of(
    model: ModelSpec,
    training: Training,
    nvme_paths: tuple[str, ...] = (DEFAULT_NVME_PATH,),
    *,
    tiles: bool = True,
) -> ZeroConfig:
    """Return the configuration of ``training``: stage, precision, batch sizes, tiers, ``tiles`` of large
    layers, and the limit under which large blocks are gathered ahead.

    Where activations have to be recomputed, the model has to do it: no key of a configuration says so.
    """
    offload: dict[str, Any] = {
        kind: getattr(training, kind)
        for kind in ("params", "grads", "optimizer")
        if getattr(training, kind) != "device"
    }
    if "nvme" in offload.values():
        offload["nvme_paths"] = list(nvme_paths)
    values: dict[str, Any] = {
        "stage": training.stage,
        "precision": {"dtype": "bf16", "moments_dtype": training.moments_dtype},
        "batch": {
            "train_batch_size": training.samples,
            "micro_batch_size": training.micro_batch,
            "gradient_accumulation_steps": training.accumulation_steps,
        },
        "gradient_clipping": 1.0,
        "offload": offload,
    }
    units: dict[str, Any] = {}
    if tiles and training.stage == 3 and model.shape.tiles > 1:
        units["tiles"] = {"Linear": model.shape.matrix_tiles}
    if training.max_live_elements != UnitConfig().max_live_elements:
        units["max_live_elements"] = training.max_live_elements
    return ZeroConfig.from_mapping({**values, "units": units})
