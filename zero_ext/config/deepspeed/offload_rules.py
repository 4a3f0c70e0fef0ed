"""Host and NVMe tiers of the translation, which depend on several keys."""

from __future__ import annotations

from pathlib import PurePath

from zero_ext.config.config_errors import Problem

from .offload_keys import AIO, OLD_FORMS, OPTIMIZER, PARAM
from .resolve_auto import ResolvedKeys
from .translation_note import Note


def normalize_tiers(resolved: ResolvedKeys) -> list[Note]:
    """Convert old flags and a ratio of zero to their new form, and check the sections.

    Removes the `aio` section if nothing is stored on NVMe. Adds a problem for a device 'nvme' without an
    nvme_path.

    Returns:
        Notes on the keys that were ignored.
    """
    for path, section in OLD_FORMS.items():
        _apply_old_flag(path, section, resolved)
    if resolved.values.get(f"{OPTIMIZER}.ratio") == 0:
        resolved.values[f"{OPTIMIZER}.device"] = "none"
    notes = _drop_parameters_that_stay(resolved)
    for section in (PARAM, OPTIMIZER):
        device, path = _device(section, resolved), f"{section}.nvme_path"
        nvme_path = resolved.values.get(path)
        if device == "nvme" and nvme_path is None:
            resolved.problems.append(
                Problem(
                    path, "the required key is missing: device is 'nvme'. Name a folder on an NVMe device."
                )
            )
        elif device == "cpu" and nvme_path is not None:
            notes.append(Note(path, "no effect", "device is 'cpu'"))
    unused = [path for path in resolved.values if path.startswith(f"{AIO}.")]
    if unused and not _on_nvme(resolved):
        for path in unused:
            del resolved.values[path]
        notes.append(Note(AIO, "no effect", "nothing is offloaded to NVMe"))
    return notes


def set_tiers(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    """Set the native values that depend on both sections: the folders, and the tier of gradients."""
    folders: dict[PurePath, object] = {}
    for section in _on_nvme(resolved):
        path = resolved.values.get(f"{section}.nvme_path")
        if path is not None:
            folders.setdefault(PurePath(str(path)), path)
    if folders:
        native["offload.nvme_paths"] = list(folders.values())
    if _device(OPTIMIZER, resolved) != "none" and native["stage"] in (2, 3):
        native["offload.grads"] = "host"


def _drop_parameters_that_stay(resolved: ResolvedKeys) -> list[Note]:
    """Remove offload_param below stage 3, where no parameter is sharded and DeepSpeed does not read it."""
    stage = resolved.values.get("zero_optimization.stage", 0)
    if stage == 3 or _device(PARAM, resolved) == "none":
        return []
    written = resolved.written[f"{PARAM}.device"].removesuffix(".device")
    for path in [path for path in resolved.values if path.startswith(f"{PARAM}.")]:
        del resolved.values[path]
    return [Note(written, "no effect", f"it acts in stage 3, and the stage is {stage}")]


def _device(section: str, resolved: ResolvedKeys) -> str:
    return str(resolved.values.get(f"{section}.device", "none")).lower()


def _on_nvme(resolved: ResolvedKeys) -> list[str]:
    return [section for section in (PARAM, OPTIMIZER) if _device(section, resolved) == "nvme"]


def _apply_old_flag(path: str, section: str, resolved: ResolvedKeys) -> None:
    """Convert an old flag to the device of its section. Both forms together are an error, as in DeepSpeed."""
    value = resolved.values.get(path)
    if value is None:
        return
    written = resolved.written[path]
    if any(name.startswith(f"{section}.") for name in resolved.values):
        resolved.problems.append(Problem(written, f"it is the old form of {section}. Keep one of the two."))
    elif value is True:
        resolved.values[f"{section}.device"] = "cpu"
        resolved.written[f"{section}.device"] = written
