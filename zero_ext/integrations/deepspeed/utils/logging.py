"""DeepSpeed's log under its names: zero_ext's own logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from zero_ext.integrations.deepspeed.unsupported import names_of

logger = logging.getLogger("zero_ext")
_LOGGED: set[str] = set()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on these ranks; None or -1 among them for all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` as :func:`log_dist` does, the first time that this process asks for it."""
    if message not in _LOGGED:
        _LOGGED.add(message)
        log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name. ``ValueError`` for an unknown one."""
    (custom_logger or logger).setLevel(log_level_str.upper())


__getattr__ = names_of("deepspeed.utils.logging")
