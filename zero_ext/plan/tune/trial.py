"""The interface of a training script to `zero-ext tune`: two lines, which do nothing in an ordinary run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zero_ext.config import ZeroConfig, load_config

CONFIG = "ZERO_EXT_TRIAL_CONFIG"
STEPS = "ZERO_EXT_TRIAL_STEPS"
RESULT = "ZERO_EXT_TRIAL_RESULT"
WARM_UP_STEPS = 2

Item = TypeVar("Item")


@dataclass(frozen=True)
class Trial:
    """The configuration to train with, and the steps that are measured.

    Outside `zero-ext tune` it is the script's own configuration and measures nothing.

    Attributes:
        config: of the trial, else what the script gave.
        measured_steps: steps that are timed, after two that are not; 0 outside a trial.
        result: where rank 0 writes what it measured.

    Examples:
        >>> from zero_ext.plan import Trial
        >>> trial = Trial.current({"stage": 2})
        >>> trial.config.stage, trial.measured_steps
        (2, 0)
    """

    config: ZeroConfig
    measured_steps: int = 0
    result: Path | None = None

    @classmethod
    def current(cls, config: ZeroConfig | Mapping[str, Any] | str | Path | None = None) -> Trial:
        """Return the trial that this process is, by its environment variables; else one with `config`.

        Args:
            config: as for [`load_config`][zero_ext.load_config].

        Returns:
            The trial.

        Raises:
            ConfigError: the configuration cannot be used.
            ValueError: the number of steps is none.
        """
        path, steps = os.environ.get(CONFIG), os.environ.get(STEPS, "")
        if path is None:
            return cls(load_config(config))
        if not steps.isdecimal() or int(steps) < 1:
            raise ValueError(
                f"{STEPS}: expected an integer of at least 1, got {steps!r}. Let zero-ext tune set it."
            )
        result = os.environ.get(RESULT)
        return cls(load_config(path), int(steps), Path(result) if result else None)

    def steps(self, batches: Iterable[Item], samples: int | None = None) -> Iterator[Item]:
        """Yield `batches`, one per micro-batch; in a trial as many as it takes, timed, and no more.

        Args:
            batches: of the script's loader.
            samples: samples of one of them on one rank; default the configuration's micro-batch size.

        Yields:
            The batches.

        Raises:
            RuntimeError: they end before the trial does.
        """
        if not self.measured_steps:
            yield from batches
            return
        of_step = self.config.batch.gradient_accumulation_steps
        warm_up, wanted = WARM_UP_STEPS * of_step, self.measured_steps * of_step
        begin, count = 0.0, 0
        for item in batches:
            if count == warm_up:
                begin = _now()
            if count == warm_up + wanted:
                break
            count += 1
            yield item
        if count < warm_up + wanted:
            raise RuntimeError(
                f"micro-batches of a trial: expected {warm_up + wanted}, got {count} before the script's "
                "loader ended. Make the loader yield more, or lower --steps."
            )
        self._write(wanted * (samples or self.config.batch.micro_batch_size or 1), _now() - begin)

    def _write(self, samples: int, seconds: float) -> None:
        if self.result is None or os.environ.get("RANK", "0") != "0":
            return
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        found = {"samples_per_second": samples * ranks / seconds, "seconds": seconds}
        partial = self.result.with_suffix(".part")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.rename(self.result)


def _now() -> float:
    """Return the time at which the accelerator, if there is one, has done what it was given."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
