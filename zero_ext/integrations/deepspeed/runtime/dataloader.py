"""``RepeatingLoader``: a loader that begins again at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_ext.integrations.deepspeed.unsupported import names_of


class RepeatingLoader:
    """Iterates over ``loader`` without end; each new round is the loader's next epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader: the loader has no batches. Pass one with at least one batch."
            ) from None


__getattr__ = names_of("deepspeed.runtime.dataloader")
