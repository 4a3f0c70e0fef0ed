"""A plan as JSON and as a ready configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero_ext.plan.nearest_fit import why_nothing_fits
from zero_ext.plan.plan_entry import TIERS, PlanEntry
from zero_ext.plan.planner import Plan
from zero_ext.plan.write_config import DEFAULT_NVME_PATH, config_of


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return everything that the tables show, in bytes and seconds."""
    return {
        "model": {"name": plan.model.name, "parameters": plan.model.parameters, "source": plan.model.source},
        "gpus": plan.gpus,
        "hosts": plan.hosts,
        "machine": plan.hardware.to_mapping(),
        "samples_per_step": plan.batch.samples,
        "sequence": plan.model.shape.sequence,
        "objective": plan.objective,
        "placements": [_row_as_json(plan, row) for row in plan.entries],
        "recommendation": None
        if plan.recommendation is None
        else {
            "placement": str(plan.recommendation.entry.candidate),
            "reasons": list(plan.recommendation.reasons),
            "config": config_of(plan.model, plan.recommendation.entry.training).model_dump(
                mode="json", exclude_unset=True
            ),
        },
        "why_nothing_fits": None if plan.recommendation is not None else why_nothing_fits(plan),
    }


def write_config(plan: Plan, path: Path, nvme_paths: tuple[str, ...]) -> None:
    """Write the recommended placement as a configuration file. ValueError if nothing fits."""
    if plan.recommendation is None:
        raise ValueError(why_nothing_fits(plan))
    config = config_of(plan.model, plan.recommendation.entry.training, nvme_paths or (DEFAULT_NVME_PATH,))
    said = config.model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _row_as_json(plan: Plan, row: PlanEntry) -> dict[str, Any]:
    training, step = row.training, row.step
    return {
        "stage": training.stage,
        "params": training.params,
        "grads": training.grads,
        "optimizer": training.optimizer,
        "activations": training.activations,
        "micro_batch": training.micro_batch,
        "accumulation_steps": training.accumulation_steps,
        "largest_micro_batch": row.largest_micro_batch,
        "bytes": {tier: row.by_kind(tier) for tier in TIERS},
        "fits": row.fits,
        "lacks": {short.tier: short.needed - short.available for short in row.shortfalls},
        "sent_bytes": step.sent,
        "inter_node_bytes": {
            "full": plan.crossing(row, compressed=False),
            "compressed": plan.crossing(row, compressed=True),
        },
        "pcie_bytes": {"to_device": step.to_device, "to_host": step.to_host},
        "nvme_bytes": {"read": step.read, "written": step.written},
        "step_seconds": step.seconds,
        "busiest": step.busiest,
        "tokens_per_second": row.tokens_per_second,
        "total_seconds": plan.total_seconds(row),
    }
