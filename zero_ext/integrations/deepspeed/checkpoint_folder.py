"""The files of a DeepSpeed checkpoint: which there are, and that none is missing or too many."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.regular_file import read_limited

_LATEST = "latest"
_LONGEST_TAG = 255
_TAG = re.compile(r"[^/\\\0\n]+")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
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


def find_files(folder: str | os.PathLike[str], tag: str | None = None) -> CheckpointFiles:
    """The files of ``folder/tag``, by default of the tag that ``folder/latest`` names.

    ``folder`` may also be the folder of one tag itself. CheckpointError names what is missing, double or of a
    kind that is not read (tensor, pipeline or expert parallel).
    """
    path = _tag_folder(Path(folder).absolute(), tag)
    names = sorted(entry.name for entry in path.iterdir())
    for name in names:
        for prefix, what in _ELSEWHERE.items():
            if name.startswith(prefix):
                raise CheckpointError(
                    f"{path / name}: holds {what}, which cannot be imported; only data-parallel checkpoints "
                    "of ZeRO stages 1 to 3 can"
                )
    optimizer = _by_rank(path, names, _OPTIMIZER)
    if not optimizer:
        raise CheckpointError(
            f"{path}: no '*_optim_states.pt' files; a checkpoint of ZeRO stages 1 to 3 has one for each rank"
        )
    partitioned = _by_rank(path, names, _MODEL_OF_RANK)
    whole = [name for name in names if _MODEL.fullmatch(name)]
    if bool(partitioned) == bool(whole):
        raise CheckpointError(
            f"{path}: has {len(whole)} files 'mp_rank_*_model_states.pt' (stages 1 and 2) and "
            f"{len(partitioned)} files 'zero_pp_rank_*_model_states.pt' (stage 3); files of one kind wanted. "
            "Was one checkpoint written over another, or is it incomplete?"
        )
    if len(whole) > 1 or (whole and whole != ["mp_rank_00_model_states.pt"]):
        raise CheckpointError(f"{path}: {whole[-1]} is of a tensor-parallel run, which cannot be imported")
    model = partitioned or (path / whole[0],)
    if partitioned and len(partitioned) != len(optimizer):
        raise CheckpointError(
            f"{path}: {len(optimizer)} ranks have optimizer files and {len(partitioned)} model files; "
            "a rank's save is missing"
        )
    return CheckpointFiles(path, optimizer, model, bool(partitioned))


def _tag_folder(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if tag is None and any(_OPTIMIZER.fullmatch(entry.name) for entry in folder.iterdir()):
        return folder
    source = "the argument 'tag'"
    if tag is None:
        latest = folder / _LATEST
        source = str(latest)
        try:
            tag = read_limited(latest, _LONGEST_TAG + 2).decode("utf-8", "replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"{latest}: cannot be read: {error.strerror}; give tag= or the folder of one checkpoint; "
                f"there: {_tags(folder)}"
            ) from error
    if _TAG.fullmatch(tag) is None or len(tag) > _LONGEST_TAG or tag in (".", ".."):
        raise CheckpointError(f"{source}: says {tag!r}, wanted the name of a folder in {folder}")
    path = folder / tag
    if not path.is_dir():
        raise CheckpointError(f"{source}: says {tag!r}, but {path} is no folder; there: {_tags(folder)}")
    return path


def _tags(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return ", ".join(names[:10]) or "none"


def _by_rank(path: Path, names: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    """The files that match, in rank order; all ranks from 0 on have to be there once."""
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank, model_rank = int(match[1]), int(match[2])
        if model_rank:
            raise CheckpointError(
                f"{path / name}: of tensor-parallel rank {model_rank}; such runs cannot be imported"
            )
        if rank in found:
            raise CheckpointError(f"{path}: {found[rank].name} and {name} are both of rank {rank}")
        found[rank] = path / name
    missing = [rank for rank in range(len(found)) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{path}: {len(found)} files like {next(iter(found.values())).name}, the highest of rank "
            f"{max(found)}; that of rank {missing[0]} is missing"
        )
    return tuple(found[rank] for rank in range(len(found)))
