"""A row of a plan as a configuration that trains so."""

from __future__ import annotations

from typing import Any

from zero_ext.config import ZeroConfig
from zero_ext.plan.planner import Plan
from zero_ext.plan.row import PlanRow

DEFAULT_NVME_PATH = "/nvme"


def config_of(plan: Plan, row: PlanRow, nvme_paths: tuple[str, ...] = (DEFAULT_NVME_PATH,)) -> ZeroConfig:
    """The configuration of ``row``: stage, precision, batch sizes, tiers, tiles.

    Where activations have to be recomputed, the model has to do it: no key of a configuration says so.
    """
    training = row.training
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
            "train_batch_size": row.samples,
            "micro_batch_size": training.micro_batch,
            "gradient_accumulation_steps": training.accumulation_steps,
        },
        "gradient_clipping": 1.0,
        "offload": offload,
    }
    shape = plan.model.shape
    if training.stage == 3 and shape.tiles > 1:
        values["units"] = {"tiles": {"Linear": shape.matrix_tiles}}
    return ZeroConfig.from_mapping(values)
