"""Checkpoints under ZeroStrategy: resuming, other world sizes, ModelCheckpoint, evaluation, bad folders."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import zero_ext
from tests.integrations.lightning.modules import Language, enter, largest_difference, loader, trainer
from tests.multi.rank import World
from tests.zero.training import distance
from zero_ext.checkpoint import inspect_checkpoint
from zero_ext.integrations.lightning import ZeroStrategy
from zero_ext.zero import engine_of

MODULE = "tests.integrations.lightning.test_lightning_checkpoints"
BATCH = 4  # samples of a step, over all ranks


def fitted(world: World, stage: int, folder: Path, epochs: int, **arguments: Any) -> tuple[Language, Any]:
    enter(world)
    seed = arguments.pop("seed", world.seed)
    module = Language(seed)
    made = trainer(world, ZeroStrategy(stage), str(folder), max_epochs=epochs, **arguments.pop("trainer", {}))
    # The samples of a step are the same at every world size.
    made.fit(module, loader(seed, BATCH // world.size), loader(seed + 1, BATCH // world.size), **arguments)
    return module, made


def train_and_return(world: World, folder: str) -> list[float]:
    """Four epochs; the best two and the last are kept, at other names and elsewhere as weights only."""
    root = Path(folder)
    best = ModelCheckpoint(
        root / "best", filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True
    )
    every = ModelCheckpoint(root / "every", filename="{epoch}", save_top_k=-1)
    rates = LearningRateMonitor()
    callbacks = [best, every, rates, EarlyStopping("val_loss", patience=100)]
    module, made = fitted(
        world, 3, root, 4, trainer={"callbacks": callbacks, "logger": CSVLogger(root / "log")}
    )
    assert list(rates.lrs) == ["lr-AdamW"]
    made.save_checkpoint(root / "weights", weights_only=True)
    world.barrier()
    results = sorted(path.name for path in (root / "best").iterdir())
    assert len(results) == 3 and "last.ckpt" in results and Path(best.best_model_path).name in results, (
        results
    )
    assert sorted(path.name for path in (root / "every").iterdir()) == [f"epoch={e}.ckpt" for e in range(4)]
    check_evaluation(world, module, made, best)
    if world.rank == 0:
        torch.save(zero_ext.full_state_dict(module, rank0_only=True), root / "full.pt")
    else:
        zero_ext.full_state_dict(module, rank0_only=True)
    return module.losses


def check_evaluation(world: World, module: Language, made: Any, best: ModelCheckpoint) -> None:
    """validate, test and predict on the module that was trained, with its own weights and the best."""
    weights = zero_ext.full_state_dict(module)
    plain = Language(world.seed)
    plain.load_state_dict(weights)
    check_predictions(world, plain, made.predict(module, loader(world.seed + 1, 2)), world.seed + 1)
    full_loss = made.validate(module, loader(world.seed + 1, 2), verbose=False)[0]["val_loss"]
    losses = torch.stack([plain.loss_of(batch).detach() for batch in loader(world.seed + 1, 2)])
    assert full_loss == pytest.approx(losses.mean().item(), rel=1e-5)
    again = made.test(module, loader(world.seed + 1, 2), ckpt_path="best", verbose=False)[0]["test_loss"]
    assert again == pytest.approx(float(best.best_model_score), rel=1e-5)
    made.strategy.load_checkpoint(str(best.dirpath) + "/../every/epoch=3.ckpt")
    assert distance(zero_ext.full_state_dict(module), weights) == 0


def check_predictions(world: World, plain: Language, found: list[torch.Tensor], seed: int) -> None:
    """``found`` are the logits of this rank's samples, in Lightning's order, in batches of 2."""
    ids = torch.cat([batch[0] for batch in loader(seed, 1)])[world.rank :: world.size]
    with torch.no_grad():
        wanted = plain.model(ids)
    assert [len(indices) for indices in found] == [2] * (len(ids) // 2)
    assert torch.allclose(torch.cat(found), wanted, rtol=1e-5, atol=1e-6)


def go_on(world: World, folder: str, seed: int, stage: int) -> list[float]:
    """From the end of epoch 1 to that of epoch 3, at this world size and stage."""
    root = Path(folder)
    # Its own generator must not matter: what is loaded counts.
    module, made = fitted(world, stage, root, 4, seed=seed, ckpt_path=str(root / "every" / "epoch=1.ckpt"))
    assert made.current_epoch == 4 and engine_of(module).steps == made.global_step
    reference = torch.load(root / "full.pt", weights_only=True)
    assert distance(zero_ext.full_state_dict(module), reference) < (1e-5 if world.size == 2 else 1e-3)
    assert len(module.losses) == 2 * 24 // BATCH and max(module.rates) < module.rate
    return module.losses


def evaluate_alone(world: World, folder: str, seed: int) -> None:
    """predict and validate without training: no optimizer state, from full and from weights-only folders."""
    enter(world)
    reference = torch.load(Path(folder) / "full.pt", weights_only=True)
    for name in ("every/epoch=3.ckpt", "weights"):
        module = Language(seed + 5, in_configure_model=True)
        made = trainer(world, ZeroStrategy(3))
        found = made.predict(module, loader(seed, 2), ckpt_path=str(Path(folder) / name))
        assert distance(zero_ext.full_state_dict(module), reference) == 0
        engine = engine_of(module)
        assert engine.optimizer_step.stepper is None and engine.memory_breakdown()["optimizer"] == 0
        plain = Language(seed)
        plain.load_state_dict(reference)
        check_predictions(world, plain, found, seed)


def refuse(world: World, folder: str, seed: int) -> None:
    """Folders that cannot be resumed from change nothing and say why."""
    root = Path(folder)
    cases = (
        (root / "full.pt", "is a file that another strategy wrote by pickle"),
        (root / "none", "holds no checkpoint"),
        (root / "weights", "got weights only"),
        (root / "plain", "expected a checkpoint of a ZeroStrategy"),
        (root / "damaged", "checksum|CRC|damaged"),
    )
    for path, message in cases:
        with pytest.raises((ValueError, zero_ext.checkpoint.CheckpointError), match=message):
            fitted(world, 3, root, 4, seed=seed, ckpt_path=str(path))
    enter(world)
    other = Language(seed)
    other.extra = nn.Linear(3, 3)
    made = trainer(world, ZeroStrategy(2), max_epochs=4)
    with pytest.raises(ValueError, match=r"extra\.weight"):
        made.fit(other, loader(seed), ckpt_path=str(root / "every" / "epoch=1.ckpt"))


def save_plain(world: World, folder: str) -> None:
    model, _ = zero_ext.prepare(Language(1), None, {"stage": 3})
    zero_ext.save_checkpoint(Path(folder) / "plain", model)


def test_resuming_at_other_world_sizes_and_stages(rank_pool: Any, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    folder = str(tmp_path)
    results = rank_pool.run(2, f"{MODULE}:train_and_return", {"folder": folder}, seed=seed)
    saved = inspect_checkpoint(tmp_path / "every" / "epoch=1.ckpt")
    assert saved.world_size == 2 and saved.step == 12 and not saved.damage
    assert saved.bytes_by_kind["exp_avg"] == saved.bytes_by_kind["master"]
    assert list(inspect_checkpoint(tmp_path / "weights").bytes_by_kind) in (["master"], ["master", "buffer"])
    files = [path for folder in ("best", "every") for path in (tmp_path / folder).rglob("*.*/*/*")]
    assert {path.suffix for path in files} == {".safetensors", ".json"}

    for stage in (3, 1):
        again = rank_pool.run(2, f"{MODULE}:go_on", {"folder": folder, "seed": seed, "stage": stage})
        for one, other in zip(again, results, strict=True):
            assert largest_difference(one, other[12:24]) < 1e-5
    alone = rank_pool.run(1, f"{MODULE}:go_on", {"folder": folder, "seed": seed, "stage": 2})[0]
    mean = [(a + b) / 2 for a, b in zip(results[0][12:24], results[1][12:24], strict=True)]
    assert largest_difference(alone, mean) < 1e-4
    rank_pool.run(2, f"{MODULE}:evaluate_alone", {"folder": folder, "seed": seed})
    rank_pool.run(2, f"{MODULE}:save_plain", {"folder": folder})
    damage(tmp_path / "every" / "epoch=1.ckpt", tmp_path / "damaged")
    rank_pool.run(2, f"{MODULE}:refuse", {"folder": folder, "seed": seed})


def damage(source: Path, target: Path) -> None:
    """A copy with one bit of one shard file flipped."""
    for path in source.rglob("*"):
        if path.is_file() and path.name != ".lock":
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            data = bytearray(path.read_bytes())
            if path.suffix == ".safetensors":
                data[-1] ^= 1
            copy.write_bytes(bytes(data))
    assert json.loads(next(target.rglob("manifest.json")).read_text())["world_size"] == 2
