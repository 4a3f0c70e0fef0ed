"""Whole weights in one file: what others have put at the names that are written on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zero_ext.integrations.deepspeed.checkpoint_io.weights_file import _write


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_link_at_the_partial_name_is_not_followed(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.write_text("precious")
    folder.mkdir()
    (folder / f".partial-{name}").symlink_to(outside)
    _write({"a": torch.arange(3)}, folder / name)
    assert outside.read_text() == "precious"
    read = load_file if name.endswith("safetensors") else torch.load
    assert torch.equal(read(folder / name)["a"], torch.arange(3))
    assert [path.name for path in folder.iterdir()] == [name]
