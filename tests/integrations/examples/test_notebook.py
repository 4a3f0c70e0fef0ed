"""The notebook runs from its first cell to its last, and what is stored in it is what it shows today."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from tests.integrations.launch import ROOT

EXAMPLES = ROOT / "examples"
NUMBERS = re.compile(r"\d+\.\d+")


def shown(notebook: NotebookNode) -> tuple[str, list[bytes]]:
    """Return what the cells printed and their images."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    printed = "".join(each.text for each in outputs if each.get("name") == "stdout")
    images = [each.data["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    return printed, [base64.b64decode(each) for each in images]


def test_the_notebook_shows_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, EXAMPLES))))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    notebook = nbformat.read(EXAMPLES / "plan_train_watch.ipynb", as_version=4)
    stored, saved_images = shown(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed, images = shown(notebook)

    assert NUMBERS.sub("N", printed) == NUMBERS.sub("N", stored)
    numbers = [[float(each) for each in NUMBERS.findall(text)] for text in (printed, stored)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05)  # the losses differ between processors
    assert len(images) == len(saved_images) == 3
    for now, before in zip(images, saved_images, strict=True):
        sizes = [Image.open(io.BytesIO(each)).size for each in (now, before)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    assert images[2] == (tmp_path / "watched" / "memory-rank0.png").read_bytes()
