"""``deepspeed.checkpointing``: activation checkpointing, by ``torch.utils.checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, names_of

_SECTION = "activation_checkpointing"
# The JSON's keys under this function's names, and what cannot be served if it is true.
_NAMES = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "cpu_checkpointing": "checkpoint_in_cpu",
}
_WITHOUT_EFFECT = ("num_checkpoints", "synchronize", "profile")


def configure(mpu_: object = None, deepspeed_config: Any = None, **given: Any) -> None:
    """Checks what is asked for; there is nothing to set.

    ``deepspeed_config`` is DeepSpeed's JSON, its path or a ``DeepSpeedConfig``; ``given`` overrides it:
    partition_activations, contiguous_checkpointing, checkpoint_in_cpu, num_checkpoints, synchronize, profile.
    Raises :class:`DeepSpeedFeatureError` for the first three if they are true.
    """
    asked = dict.fromkeys(_NAMES.values(), False)
    section = _values(deepspeed_config).get(_SECTION) or {}
    for key, name in _NAMES.items():
        asked[name] = bool(section.get(key, False))
    for name, value in given.items():
        if name in asked:
            asked[name] = asked[name] if value is None else bool(value)
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"checkpointing.configure has no argument {name!r}")
    for name, wanted in asked.items():
        if wanted:
            raise DeepSpeedFeatureError(
                f"checkpointing.configure({name}=True) is not served: activations are recomputed by "
                "torch.utils.checkpoint, and what it saves stays where it is; set it to False"
            )


def is_configured() -> bool:
    """True: :func:`checkpoint` needs no configuration."""
    return True


def reset() -> None:
    """Nothing to forget."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` and keeps its inputs only; backward runs it again.

    It sees the random numbers of the first run. Works inside sharded models at every stage.
    """
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def _values(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text())
    config = getattr(config, "values", config) if not isinstance(config, Mapping) else config
    if not isinstance(config, Mapping):
        raise TypeError(f"deepspeed_config: a mapping or a path wanted, {type(config).__name__} given")
    return config


__getattr__ = names_of("deepspeed.checkpointing")
