"""``load_weights``: weights in any of the formats that are read here, into a prepared model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torch import nn

from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.tensor_files import WEIGHT_NAMES, find_weights
from zero_ext.checkpoint.inspection import holds_checkpoints
from zero_ext.checkpoint.weights.fill_weights import Rename, fill_weights
from zero_ext.checkpoint.weights.weight_sources import CheckpointWeights, SafetensorsWeights, WeightSource
from zero_ext.integrations.dcp_metadata import METADATA
from zero_ext.integrations.dcp_weights import DcpWeights


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> tuple[list[str], list[str]]:
    """Load weights alone into a prepared model of any stage, tiers and ranks; a collective.

    Every rank reads the bytes of its own shards, in chunks, straight into their tiers, so no rank ever holds
    the full model. After `prepare(model_on_meta, init="skip")` it never did. Floating-point tensors are
    converted. Master weights get the values of the file, in float32. Optimizer state stays as it is,
    gradients are dropped. A tensor of a parameter that is not stored in the order that it has in memory is
    read in full by every rank that has a slice of it, one at a time.

    `path` is a folder as `save_pretrained` writes it, with `model.safetensors` or several files and their
    index, that index or a single file; or a folder of checkpoints that
    [`save_checkpoint`][zero_ext.save_checkpoint] wrote, or one of these; or what DeepSpeed's
    `save_checkpoint` was given (ZeRO stages 1 to 3), or the folder of one tag, or what its `ds_to_universal`
    wrote; or what `torch.distributed.checkpoint.save` wrote (DCP, as of FSDP2). Values in it that are no
    tensors are left out. No code in these files is run.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        path: in one of these formats; readable on every rank.
        step: number of zero_ext's checkpoint, or tag of DeepSpeed's; default the latest.
        strict: raise for tensors that are missing or that the model does not have, instead of leaving them.
            A tied parameter may come under any of its names; the last one counts, as in torch.
        rename: from names in the files to names in the model: a mapping (others stay) or a function. None
            leaves the tensor out, as the `optim.` ones of a DCP checkpoint.

    Returns:
        The missing and the unexpected names.

    Raises:
        ValueError: names, shapes or dtypes do not fit; nothing was changed.
        CheckpointError: a file is missing, damaged, hostile or of none of these formats; nothing was changed.
            Or reading or storing failed later: the model then refuses to go on until all weights or a
            checkpoint are loaded.

    Examples:
        >>> from safetensors.torch import save_file
        >>> save_file({"weight": torch.eye(2), "bias": torch.ones(2)}, "model.safetensors")
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 2)
        >>> model, _ = zero_ext.prepare(model, None, {"stage": 3}, init="skip", device="cpu")
        >>> zero_ext.load_weights(model, "model.safetensors")
        ([], [])
        >>> zero_ext.full_state_dict(model)["bias"]
        tensor([1., 1.])
    """
    return fill_weights(model, f"{path}", partial(open_weights, path, step), strict, rename)


def open_weights(path: str | os.PathLike[str], step: int | str | None) -> WeightSource:
    """Return the weights in ``path``; ``CheckpointError`` if they are damaged or of another format."""
    path = Path(path).absolute()
    if not path.is_dir() or (step is None and any((path / name).exists() for name in WEIGHT_NAMES)):
        if step is not None:
            raise ValueError(
                f"step: expected None for a file, which has no steps, got {step!r}. Leave it out."
            )
        return SafetensorsWeights(find_weights(path))
    if holds_checkpoints(path):
        if step is not None and type(step) is not int:
            raise ValueError(f"step: expected the number of a checkpoint, got {step!r}. Pass a number.")
        return CheckpointWeights(path, step)
    if (path / METADATA).exists():
        if step is not None:
            raise ValueError(f"step: expected None for a torch DCP checkpoint, got {step!r}. Leave it out.")
        return DcpWeights(path)
    # A package that takes a second to import, and that loops of this package's own have no use for.
    from zero_ext.integrations.deepspeed.checkpoint_io import checkpoint_folder
    from zero_ext.integrations.deepspeed.checkpoint_io.deepspeed_weights import DeepSpeedWeights
    from zero_ext.integrations.deepspeed.checkpoint_io.universal_weights import UniversalWeights

    if checkpoint_folder.holds_deepspeed(path):
        folder = checkpoint_folder.tag_folder(path, None if step is None else str(step))
        return (UniversalWeights if checkpoint_folder.is_universal(folder) else DeepSpeedWeights)(folder)
    seen = sorted(entry.name for entry in path.iterdir())[:8]
    asked = "" if step is None else f" and step {step!r}, which only checkpoints have"
    raise CheckpointError(
        f"{path}: expected {' or '.join(WEIGHT_NAMES)}, checkpoints of zero_ext, or one of DeepSpeed's ZeRO "
        f"stages 1 to 3 or of torch DCP, got {seen}{asked}. Convert other formats with the library that "
        "wrote them: model.save_pretrained(folder)."
    )
