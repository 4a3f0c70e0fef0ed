"""Checkpoints in a folder by their tags, and the files of one that DeepSpeed wrote: that none is missing or
too many."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.files import read_limited
from zero_ext.checkpoint.inspection import holds_checkpoints

LATEST = "latest"
PARAMETERS = "zero"  # folder of a universal checkpoint's parameters
_LATEST_UNIVERSAL = "latest_universal"
CLIENT_STATE = "client"  # its key in the client_state of checkpoints that this API saves
_LONGEST_TAG = 255
_TAG = re.compile(rf"[^/\\\0\n]{{1,{_LONGEST_TAG}}}")
_FILE = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_(model|optim)_states\.pt")
_ELSEWHERE = {
    "expert_": "experts of a mixture-of-experts model",
    "layer_": "layers that pipeline ranks saved",
    "expp_rank_": "optimizer state of experts",
}


@dataclass(frozen=True)
class CheckpointFiles:
    """One checkpoint: ``path`` is its folder; the optimizer's files in rank order; the model's file, or
    where the parameters themselves are partitioned (stage 3) one for each rank."""

    path: Path
    optimizer: tuple[Path, ...]
    model: tuple[Path, ...]
    model_by_rank: bool


def tag_folder(folder: Path, tag: str | None) -> Path:
    """Return the folder of the checkpoint ``folder/tag``, by default of the tag that ``folder/latest`` names,
    or ``latest_universal`` where there is no such file.

    ``folder`` may also be that of one checkpoint. CheckpointError says what is there if it is not.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Check the path.")
    source = "tag"
    if tag is None:
        names = [entry.name for entry in folder.iterdir()]
        if holds_checkpoints(folder) or is_universal(folder) or any(map(_FILE.fullmatch, names)):
            return folder
        latest = folder / (LATEST if LATEST in names or _LATEST_UNIVERSAL not in names else _LATEST_UNIVERSAL)
        source = str(latest)
        try:
            tag = read_limited(latest, _LONGEST_TAG + 2).decode("utf-8", "replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"{latest}: cannot be read: {error.strerror}. Give tag= or the folder of one checkpoint, as "
                f"{_folders(folder)}."
            ) from error
    if not is_tag(tag) or not (folder / tag).is_dir():
        raise CheckpointError(
            f"{source}: expected the name of a folder in {folder}, got {tag!r}. Name one of "
            f"{_folders(folder)}."
        )
    return folder / tag


def is_tag(tag: str) -> bool:
    """Return whether ``tag`` can be the name of a folder."""
    return _TAG.fullmatch(tag) is not None and tag not in (".", "..")


def holds_deepspeed(folder: Path) -> bool:
    """Return whether DeepSpeed wrote a checkpoint to ``folder``, or to a folder inside."""
    return (
        (folder / LATEST).is_file()
        or is_universal(folder)
        or any(_FILE.fullmatch(path.name) for path in (*folder.iterdir(), *folder.glob("*/*mp_rank_*")))
    )


def _folders(folder: Path) -> str:
    return ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir())[:10]) or "none"


def is_universal(path: Path) -> bool:
    """Return whether ``ds_to_universal`` wrote this folder."""
    return (path / PARAMETERS).is_dir()


def find_files(path: Path, universal: bool = False) -> CheckpointFiles:
    """Return the files that DeepSpeed wrote to the folder of a tag.

    A ``universal`` checkpoint has no optimizer's files, and at stages 1 and 2 a model's file for each tensor
    parallel rank. CheckpointError names what is missing, double or of a kind that is not read (tensor,
    pipeline or expert parallel).
    """
    if not universal and is_universal(path):
        raise CheckpointError(
            f"{path}: expected a checkpoint of DeepSpeed's save_checkpoint, got a universal one. Load its "
            "weights with zero_ext.load_weights."
        )
    names = sorted(entry.name for entry in path.iterdir())
    for name in names:
        for prefix, what in _ELSEWHERE.items():
            if name.startswith(prefix):
                raise CheckpointError(
                    f"{path / name}: expected a data-parallel checkpoint of ZeRO stages 1 to 3, got {what}. "
                    "Use DeepSpeed to export its weights."
                )
    found: dict[str, dict[int, Path]] = {"optim": {}, "model": {}, "consolidated model": {}}
    for match in filter(None, map(_FILE.fullmatch, names)):
        kind, rank = match[3] if match[1] else f"consolidated {match[3]}", int(match[1] or match[2])
        if int(match[2]) and (match[1] or not universal):
            raise CheckpointError(
                f"{path / match[0]}: expected a data-parallel checkpoint, got one of a tensor-parallel run. "
                "Use DeepSpeed to export its weights."
            )
        if rank in found.get(kind, ()):
            raise CheckpointError(
                f"{path}: {found[kind][rank].name} and {match[0]} are both of rank {rank}. Remove the one of "
                "another run."
            )
        found.setdefault(kind, {})[rank] = path / match[0]
    optimizer = _in_order(path, found["optim"])
    if not optimizer and not universal:
        raise CheckpointError(
            f"{path}: expected one '*_optim_states.pt' file per rank, got none. Pass a checkpoint of ZeRO "
            "stages 1 to 3."
        )
    partitioned, consolidated = (_in_order(path, found[kind]) for kind in ("model", "consolidated model"))
    if bool(partitioned) == bool(consolidated):
        raise CheckpointError(
            f"{path}: expected model files of one kind, got {len(consolidated)} 'mp_rank_*_model_states.pt' "
            f"(stages 1 and 2) and {len(partitioned)} 'zero_pp_rank_*_model_states.pt' (stage 3). Remove "
            "those of another run, or copy the missing ones."
        )
    if partitioned and not universal and len(partitioned) != len(optimizer):
        raise CheckpointError(
            f"{path}: expected as many model files as optimizer files, got {len(partitioned)} and "
            f"{len(optimizer)}. Copy the files of all ranks."
        )
    return CheckpointFiles(path, optimizer, partitioned or consolidated, bool(partitioned))


def _in_order(path: Path, found: dict[int, Path]) -> tuple[Path, ...]:
    """Return the files of all ranks. Each has to be there."""
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{path}: expected a file like {next(iter(found.values())).name} of every rank to {max(found)}, "
            f"got none of rank {missing}. Copy the files of all ranks."
        )
    return tuple(found[rank] for rank in range(len(found)))
