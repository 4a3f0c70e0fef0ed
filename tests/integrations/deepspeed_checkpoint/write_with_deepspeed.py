"""Run as a program: a real DeepSpeed on two ranks saves a checkpoint of every case, resumes from it, and says
what it held: parameters, moments, losses after resuming, its own fp32 weights."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.integrations.deepspeed_checkpoint.subject import (
    CASES,
    RESUMED_FOR,
    SAVED_AFTER,
    WIDTH,
    WORDS,
    batch_of,
    config_of,
    subject_of,
)

RANKS = 2
KINDS = ("exp_avg", "exp_avg_sq")


def work(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # so that it compiles nothing
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    deepspeed.init_distributed("gloo", verbose=False)
    for name, case in CASES.items():
        write_case(Path(folder) / name, rank, **case)


def engine_of(seed: int, stage: int, dtype: str, zero: dict[str, Any]) -> Any:
    import deepspeed

    model, optimizer = subject_of(seed)
    config = config_of(RANKS, stage, dtype, zero)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, rank: int, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(batch_of(step, rank, RANKS))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    return losses


def write_case(folder: Path, rank: int, stage: int, dtype: str, zero: dict[str, Any]) -> None:
    engine = engine_of(1, stage, dtype, zero)
    train(engine, rank, 0, SAVED_AFTER)
    engine.save_checkpoint(str(folder), client_state={"mine": [1, (2, "three")]})
    held, rates = state_of(engine), engine.get_lr()
    engine.destroy()
    resumed = engine_of(2, stage, dtype, zero)
    resumed.load_checkpoint(str(folder))
    losses = train(resumed, rank, SAVED_AFTER, RESUMED_FOR)
    resumed.destroy()
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        torch.save(held, folder / "held.pt")
        torch.save(get_fp32_state_dict_from_zero_checkpoint(str(folder)), folder / "fp32.pt")
        sys.argv = ["zero_to_fp32.py", str(folder), str(folder / "converted")]
        runpy.run_path(str(folder / "zero_to_fp32.py"), run_name="__main__")
        (folder / "seen.json").write_text(json.dumps({"losses": losses, "rates": rates}))
        write_universal(folder)
        if stage == 1:
            write_universal_of_tensor_parallel_ranks(folder)


def write_universal(folder: Path) -> None:
    """``folder/universal``, with one tag, by DeepSpeed's converter."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    tag = f"global_step{SAVED_AFTER}"
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / tag),
            output_folder=str(folder / "universal" / tag),
            inject_missing_state=True,
            **options,
        )
    )


# How the subject's parameters are split over two tensor parallel ranks. The words are padded.
PADDED_WORDS, ROWS, COLUMNS = 20, ["embedding.weight", "hidden.weight"], ["out.weight"]


def write_universal_of_tensor_parallel_ranks(folder: Path) -> None:
    """What the converter makes of the same values on tensor parallel ranks that split them."""
    from deepspeed.checkpoint import ds_to_universal

    tag = folder / "universal of tensor parallel ranks" / f"global_step{SAVED_AFTER}"
    held = {
        key.removeprefix("master "): value
        for key, value in torch.load(folder / "held.pt").items()
        if key.startswith("master ")
    }
    information = {
        "vocabulary_parameter_patterns": ["embedding.weight"],
        "original_vocab_size": WORDS,
        "parameter_with_row_parallelism_patterns": COLUMNS,
        "tp_replicated_parameter_patterns": [f"^{name}$" for name in held if name not in (*ROWS, *COLUMNS)],
    }
    for name, value in held.items():
        slices = [value] * RANKS
        if name in (*ROWS, *COLUMNS):
            padding = PADDED_WORDS - WORDS if name == "embedding.weight" else 0
            padded = torch.cat([value, value.new_full((padding, WIDTH), 7.0)]) if padding else value
            slices = list(padded.chunk(RANKS, dim=1 if name in COLUMNS else 0))
        for rank, each in enumerate(slices):
            for kind in ("fp32", *KINDS):
                flat = each.detach().reshape(-1)
                ds_to_universal.dump_param_fragment(tag / "tmp", rank, 0, kind, flat, name, 0, flat.numel())
        shapes = [each.shape for each in slices]
        ds_to_universal.merge_tp_slices(information, tag / "zero", tag / "tmp", RANKS, (name, shapes))
    for rank in range(RANKS):
        shutil.copy(
            folder / f"global_step{SAVED_AFTER}" / "mp_rank_00_model_states.pt",
            tag / f"mp_rank_{rank:02}_model_states.pt",
        )
    (tag.parent / "latest_universal").write_text(tag.name)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments whole, as DeepSpeed's own accessors give them, by kind and name."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        # It links parameters with optimizer state before the first step, when torch's AdamW has none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            held[f"master {name}"] = safe_get_full_fp32_param(parameter)
            for kind in KINDS:
                held[f"{kind} {name}"] = safe_get_full_optimizer_state(parameter, kind)
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                held[f"master {name}"] = parameter.detach().clone()
    if getattr(engine.optimizer, "round_robin_gradients", False):
        held.update(round_robin_state_of(engine))
    buffers = {f"buffer {name}": buffer for name, buffer in engine.module.named_buffers()}
    return {name: value.detach().clone().cpu() for name, value in {**held, **buffers}.items()}


def round_robin_state_of(engine: Any) -> dict[str, torch.Tensor]:
    """The same where the accessors are wrong: they look for parameters in the order they had before they were
    laid out in turns. All ranks' flat partitions are joined and cut up in the order of the layout."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    held = {}
    for group, flat in zip(
        engine.optimizer.round_robin_bit16_groups,
        engine.optimizer.single_partition_of_fp32_groups,
        strict=True,
    ):
        state = engine.optimizer.optimizer.state[flat]
        for kind, own in (("master", flat), *((kind, state[kind]) for kind in KINDS)):
            shards = [torch.empty_like(own) for _ in range(RANKS)]
            torch.distributed.all_gather(shards, own.detach())
            gathered = torch.cat(shards)
            for parameter in group:
                values, gathered = gathered[: parameter.numel()], gathered[parameter.numel() :]
                held[f"{kind} {names[parameter]}"] = values.view_as(parameter)
    return held


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=RANKS)
