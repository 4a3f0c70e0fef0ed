"""Names of layers in the settings that only some parts of a model have."""

from __future__ import annotations

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig
from zero_ext.zero.units.model_parallel_sync import sum_over_model


def without_names_elsewhere(model: nn.Module, settings: ZeroConfig, parts: Collectives | None) -> ZeroConfig:
    """``settings`` for this rank's part ``model``: without the names in ``units`` that it does not have and
    another of the ranks ``parts`` does; a collective of these. What no part has stays, to be refused."""
    units = settings.units
    wanted = sorted({*units.tiles, *units.block_classes, *units.leaf_modules})
    if parts is None or not wanted:
        return settings
    here = {label for name, module in model.named_modules() for label in (name, type(module).__name__)}
    # A layer that is tiled already counts as what it was: prepare may be called again after an error.
    here |= {label.removeprefix("Tiled") for label in here}
    counts = torch.tensor([name in here for name in wanted], dtype=torch.int64, device="cpu")
    sum_over_model(parts, counts, "agreement on the names in units")
    elsewhere = {name for name, count in zip(wanted, counts.tolist(), strict=True) if count} - here
    own = units.model_copy(
        update={
            "tiles": {name: number for name, number in units.tiles.items() if name not in elsewhere},
            "block_classes": tuple(name for name in units.block_classes if name not in elsewhere),
            "leaf_modules": tuple(name for name in units.leaf_modules if name not in elsewhere),
        }
    )
    return settings.replace(units=own)
