"""The folders of a store: missing ones are created, and what cannot be one is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from zero_ext.config import AioConfig
from zero_ext.offload.tier_manager import open_store


def test_a_missing_folder_is_created_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [tmp_path / "there", tmp_path / "absent" / "below"]
    paths[0].mkdir()
    with caplog.at_level(logging.WARNING), open_store([str(path) for path in paths], AioConfig()) as store:
        assert [Path(device.path).parent.parent for device in store.facts().devices] == paths
    assert [list(path.iterdir()) for path in paths] == [[], []]
    created = [record.getMessage() for record in caplog.records if "was created" in record.getMessage()]
    assert created == [f"nvme path '{paths[1]}' did not exist and was created"]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("{tmp}/file", "expected a folder, got a file at '{tmp}/file'"),
        ("{tmp}/file/below/it", "expected a folder, got a file at '{tmp}/file'"),
        ("{tmp}/dangling", "expected a folder, got a file at '{tmp}/dangling'"),
        ("/sys/kernel/absent", "expected a folder that exists or can be created, got: "),  # to root as well
    ],
)
def test_what_cannot_be_a_folder_is_named(tmp_path: Path, name: str, seen: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    path = name.format(tmp=tmp_path)
    with pytest.raises(RuntimeError) as caught:
        open_store([path], AioConfig())
    assert str(caught.value).startswith(f"nvme path '{path}': {seen.format(tmp=tmp_path)}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dangling", "file"]
