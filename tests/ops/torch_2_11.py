"""PyTorch as it was before its storages could swap their memory (2.11)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CACHE = Path(__file__).resolve().parents[2] / "build"


def hide_swap(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, storages have no swap; what replaces it is compiled once, into build/."""
    patch.setattr(torch.UntypedStorage, "_swap_data_ptr_", None, raising=False)
    patch.setenv("XDG_CACHE_HOME", str(CACHE))
