"""The micro-batches of a step, as an iterator yields them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def micro_batches_of(
    data: Iterator[Any] | None, count: int, batch_fn: Callable[[Any], Any] | None
) -> list[tuple[Any, Any]]:
    """Return the next ``count`` pairs of inputs and labels, which ``batch_fn``, if given, makes of what
    ``data`` yields. ``ValueError`` for data that ends before, ``TypeError`` for what is no iterator or no
    pair.
    """
    if data is None:
        raise ValueError("data: expected an iterator, got none. Pass it, or training_data to initialize.")
    if not hasattr(data, "__next__"):
        raise TypeError(
            f"data: expected an iterator, got {type(data).__name__}. Pass iter(loader), or "
            "iter(deepspeed.utils.RepeatingLoader(loader))."
        )
    pairs: list[tuple[Any, Any]] = []
    while len(pairs) < count:
        try:
            found = next(data)
        except StopIteration:
            raise ValueError(
                f"data: expected {count} micro-batches, got {len(pairs)} before the iterator ended. Wrap "
                "the loader "
                "in deepspeed.utils.RepeatingLoader, which begins again at its end."
            ) from None
        if batch_fn is not None:
            found = batch_fn(found)
        if not isinstance(found, (tuple, list)) or len(found) < 2:
            raise TypeError(
                f"micro-batch: expected a pair of inputs and labels, got {type(found).__name__}. Make one "
                "with "
                "set_batch_fn."
            )
        pairs.append((found[0], found[1]))
    return pairs


def joined(micro_batches: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of micro-batches, a tensor or several each, one behind the other.

    ``TypeError`` for other things than tensors [samples, ...], ``ValueError`` for other shapes in one than in
    the first.
    """
    inputs = [tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in micro_batches]
    for value in (value for values in inputs for value in values):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            what = "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"inputs: expected tensors [samples, ...], got {what}. Convert them.")
    shapes = [[tuple(value.shape) for value in values] for values in inputs]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"inputs of micro-batch {number}: expected shapes {shapes[0]} as of the first, got "
                f"{shape}. Drop "
                "the last samples of a loader, or pad them."
            )
    return tuple(torch.cat(column) for column in zip(*inputs, strict=True))
