"""Host and NVMe tiers of the translation: what several keys together say."""

from __future__ import annotations

from pathlib import PurePath

from zero_ext.config.schema.config_errors import Problem

from .offload_keys import AIO, OLD_FORMS, OPTIMIZER, PARAM
from .resolve_auto import Settled
from .translation_note import Note


def settle_tiers(settled: Settled) -> list[Note]:
    """Put old flags, and a ratio of zero, into their new form, take out the `aio` section where nothing lives
    on NVMe, and add the problem of a device 'nvme' without its nvme_path. Returns notes on what was ignored.
    """
    for path, section in OLD_FORMS.items():
        _renew(path, section, settled)
    if settled.values.get(f"{OPTIMIZER}.ratio") == 0:
        settled.values[f"{OPTIMIZER}.device"] = "none"
    notes = _drop_parameters_that_stay(settled)
    for section in (PARAM, OPTIMIZER):
        device, path = _device(section, settled), f"{section}.nvme_path"
        given = settled.values.get(path)
        if device == "nvme" and given is None:
            settled.problems.append(
                Problem(path, "required key is missing: device is 'nvme'; name a folder on an NVMe device")
            )
        elif device == "cpu" and given is not None:
            notes.append(Note(path, "no effect", "device is 'cpu'"))
    unused = [path for path in settled.values if path.startswith(f"{AIO}.")]
    if unused and not _on_nvme(settled):
        for path in unused:
            del settled.values[path]
        notes.append(Note(AIO, "no effect", "nothing is offloaded to NVMe"))
    return notes


def set_tiers(settled: Settled, native: dict[str, object]) -> None:
    """Native values that follow from the two sections together: the folders, and the tier of gradients."""
    folders: dict[PurePath, object] = {}
    for section in _on_nvme(settled):
        path = settled.values.get(f"{section}.nvme_path")
        if path is not None:
            folders.setdefault(PurePath(str(path)), path)
    if folders:
        native["offload.nvme_paths"] = list(folders.values())
    if _device(OPTIMIZER, settled) != "none" and native["stage"] in (2, 3):
        native["offload.grads"] = "host"


def _drop_parameters_that_stay(settled: Settled) -> list[Note]:
    """Take out offload_param below stage 3, where no parameter is sharded and DeepSpeed does not read it."""
    stage = settled.values.get("zero_optimization.stage", 0)
    if stage == 3 or _device(PARAM, settled) == "none":
        return []
    written = settled.written[f"{PARAM}.device"].removesuffix(".device")
    for path in [path for path in settled.values if path.startswith(f"{PARAM}.")]:
        del settled.values[path]
    return [Note(written, "no effect", f"it acts in stage 3, and the stage is {stage}")]


def _device(section: str, settled: Settled) -> str:
    return str(settled.values.get(f"{section}.device", "none")).lower()


def _on_nvme(settled: Settled) -> list[str]:
    return [section for section in (PARAM, OPTIMIZER) if _device(section, settled) == "nvme"]


def _renew(path: str, section: str, settled: Settled) -> None:
    """Write an old flag as the device of its section. DeepSpeed too refuses both forms together."""
    value = settled.values.get(path)
    if value is None:
        return
    written = settled.written[path]
    if any(name.startswith(f"{section}.") for name in settled.values):
        settled.problems.append(Problem(written, f"is the old form of {section}; keep one of the two"))
    elif value is True:
        settled.values[f"{section}.device"] = "cpu"
        settled.written[f"{section}.device"] = written
