"""Universal checkpoints made without DeepSpeed, to be bent: every value, or an error."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed_checkpoint.forged import GROUPS, Forged
from tests.integrations.test_dcp_weights import read_all
from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint

TAG = "global_step7"


def universal(folder: Path, forged: Forged) -> tuple[Path, dict[str, torch.Tensor]]:
    """What ``ds_to_universal`` makes of it in ``folder/out``, and the values."""
    tag = forged.write(folder / "in")
    out = folder / "out" / TAG
    values = {key.removeprefix("master "): each for key, each in forged.held.items() if key[:6] == "master"}
    files = values if forged.stage < 3 else {name: each for name, each in values.items() if name != "frozen"}
    if forged.stage < 3:
        # Of what has no state of the optimizer there is a copy in float32 of what the model holds.
        files = {**files, "tied.weight": values["a.weight"].half(), "buffer": torch.arange(4)}
    for name, value in files.items():
        path = out / "zero" / name / "fp32.pt"
        path.parent.mkdir(parents=True)
        torch.save({"param": value.float(), "cat_dim": 0} if forged.stage < 3 else value.reshape(-1), path)
    for path in tag.glob("*model_states.pt"):
        shutil.copy(path, out)
    (folder / "out" / "latest_universal").write_text(TAG)
    return out, {**values, "tied.weight": values["a.weight"], "buffer": torch.arange(4)}


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("stage", [2, 3])
def test_every_value(stage: int, ranks: int, tmp_path: Path) -> None:
    out, wanted = universal(tmp_path, Forged(stage, ranks))
    for folder in (out, out.parent):
        found = read_all(folder)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


def edited(path: Path, **changes: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), **changes}, path)


class Call:
    """Pickles as a call of a function."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.find(torch.load(path)["param"].numpy().tobytes())] ^= 1
    path.write_bytes(content)


MODEL, RANK_1 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
WEIGHT = "zero/a.weight/fp32.pt"
SHAPES = [{**GROUPS[0], "a.weight": (7, 6)}, GROUPS[1]]
# Stage, what is done to the folder, and what is said of it.
FORGED: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "flipped bit": (2, lambda out: flipped(out / WEIGHT), f"{WEIGHT}: .*Bad CRC-32"),
    "call": (
        2,
        lambda out: torch.save({"param": Call()}, out / WEIGHT),
        f"{WEIGHT}: refused: .*it calls .*getpid",
    ),
    "no tensor": (2, lambda out: torch.save({"param": 3}, out / WEIGHT), "param: expected a tensor .* got 3"),
    "list": (2, lambda out: torch.save([3], out / WEIGHT), "it holds a list, not a dict"),
    "truncated": (3, lambda out: os.truncate(out / WEIGHT, 300), f"{WEIGHT}: truncated"),
    "other shape": (
        3,
        lambda out: edited(out / RANK_1.replace("1", "0", 1), param_shapes=SHAPES),
        r"a.weight: expected shape \(7, 6\), as of zero_pp_rank_0_.*, got 35 elements",
    ),
    "no model file": (2, lambda out: (out / MODEL).unlink(), "expected model files of one kind, got 0"),
    "a rank is missing": (3, lambda out: (out / RANK_1).unlink(), "expected 2 '.*_model_states.pt' files"),
    "another step": (3, lambda out: edited(out / RANK_1, global_steps=8), "expected step 7 as in .*, got 8"),
    "other buffers": (
        2,
        lambda out: (
            shutil.copy(out / MODEL, out / MODEL.replace("00", "01")),
            edited(out / MODEL.replace("00", "01"), module={"buffer": torch.zeros(4)}),
        ),
        "01_model_states.pt: buffer: expected the buffer of mp_rank_00_.*, got other values",
    ),
    "round robin": (
        2,
        lambda out: edited(out / MODEL, ds_config={"zero_optimization": {"round_robin_gradients": True}}),
        "expected a run without round_robin_gradients",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged(case: str, tmp_path: Path) -> None:
    stage, edit, pattern = FORGED[case]
    out, _ = universal(tmp_path, Forged(stage, 2))
    edit(out)
    with pytest.raises(CheckpointError, match=pattern):
        read_all(out)


def test_import_names_what_loads_it(tmp_path: Path) -> None:
    out, _ = universal(tmp_path, Forged(2, 2))
    with pytest.raises(
        CheckpointError, match=re.escape("got a universal one. Load its weights with zero_ext")
    ):
        import_deepspeed_checkpoint(out.parent, tmp_path / "imported")
