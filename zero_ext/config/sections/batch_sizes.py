"""Batch sizes: samples per step, samples per micro-batch on one rank, micro-batches per step."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from zero_ext.config.schema.base_section import ConfigSection, Positive
from zero_ext.config.schema.config_errors import ConfigError, Problem


class BatchConfig(ConfigSection):
    """Sizes of batches: train_batch_size = micro_batch_size x gradient_accumulation_steps x world size.

    Any two determine the third (`resolve`). None means that a size is not set. An accumulation left at its
    default is not set either, and `to_mapping` leaves it out.

    Attributes:
        train_batch_size: number of samples per optimizer step over all ranks.
        micro_batch_size: number of samples per forward pass on one rank.
        gradient_accumulation_steps: number of micro-batches per optimizer step.
        drop_last: whether to leave out the samples at the end of an epoch that do not fill a micro-batch of
            all ranks. False fills that micro-batch with the first samples of the next epoch.
    """

    train_batch_size: Positive | None = None
    micro_batch_size: Positive | None = None
    gradient_accumulation_steps: Positive = 1
    drop_last: bool = False

    @model_serializer(mode="wrap")
    def _omit_implicit_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if self._explicit_steps() is None:
            values.pop("gradient_accumulation_steps", None)
        return values

    def resolve(self, world_size: int) -> BatchConfig:
        """Compute the sizes that are not set.

        Args:
            world_size: data-parallel ranks.

        Returns:
            A new section. The two sizes stay None when neither is given.

        Raises:
            ConfigError: the three values contradict each other or do not divide.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                Problem(
                    "world_size",
                    f"expected an integer of at least 1, got {world_size!r}. Pass the number of ranks.",
                )
            )
        train, micro, steps = self.train_batch_size, self.micro_batch_size, self._explicit_steps()
        if train is None:
            steps = steps or 1
            train = None if micro is None else micro * steps * world_size
        elif micro is not None:
            steps = steps or train // (micro * world_size)
        else:
            steps = steps or 1
            micro = train // (steps * world_size)
        if train is not None and (not micro or not steps or train != micro * steps * world_size):
            raise ConfigError(Problem("train_batch_size", self._contradiction(world_size)), "batch sizes")
        return self.replace(train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=steps)

    def _explicit_steps(self) -> int | None:
        said = "gradient_accumulation_steps" in self.model_fields_set
        return self.gradient_accumulation_steps if said else None

    def _contradiction(self, world_size: int) -> str:
        return (
            "expected train_batch_size = micro_batch_size x gradient_accumulation_steps x ranks in "
            f"integers, got train_batch_size={self.train_batch_size}, "
            f"micro_batch_size={self.micro_batch_size}, "
            f"gradient_accumulation_steps={self._explicit_steps()} on {world_size} rank(s). Change one of "
            "them, or leave one out."
        )
