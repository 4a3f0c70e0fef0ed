"""Monitors of the translation, which depend on several keys."""

from __future__ import annotations

from pathlib import PurePosixPath

from .resolve_auto import ResolvedKeys

_STEPS_PER_PRINT = 10
_JOB = "DeepSpeedJobName"
_PRINTED = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler.enabled")


def set_monitors(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set the native ``monitor`` section, if any of DeepSpeed's monitors or breakdowns is on.

    Only these are then on.
    """
    on = {
        name
        for name in ("tensorboard", "csv_monitor", "wandb", "comms_logger", "flops_profiler")
        if resolved.values.get(f"{name}.enabled") is True
    }
    times, memory = (
        resolved.values.get(name) is True for name in ("wall_clock_breakdown", "memory_breakdown")
    )
    if not (on or times or memory):
        return
    native["monitor"] = {
        "jsonl": False,
        "timing": times,
        "memory": memory,
        "comms": "comms_logger" in on,
        **({"tensorboard": str(_folder("tensorboard", resolved))} if "tensorboard" in on else {}),
        **({"csv": str(_folder("csv_monitor", resolved) / "steps.csv")} if "csv_monitor" in on else {}),
        **({"wandb": _wandb(resolved)} if "wandb" in on else {}),
        **({"flops": {}} if "flops_profiler" in on else {}),
    }
    if any(resolved.values.get(name) is True for name in _PRINTED):
        native.setdefault("steps_per_print", _STEPS_PER_PRINT)


def _folder(section: str, resolved: ResolvedKeys) -> PurePosixPath:
    path, job = (_text(f"{section}.{name}", resolved) for name in ("output_path", "job_name"))
    return PurePosixPath(path or "") / (job or _JOB)


def _wandb(resolved: ResolvedKeys) -> dict[str, object]:
    return {
        "project": _text("wandb.project", resolved) or "deepspeed",
        "group": _text("wandb.group", resolved),
        "entity": _text("wandb.team", resolved),
    }


def _text(path: str, resolved: ResolvedKeys) -> str | None:
    """Return the value of a text key, or None if it is empty."""
    value = resolved.values.get(path)
    return value if isinstance(value, str) and value else None
