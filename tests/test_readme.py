"""The code in the README and in the pages that no other test runs, as it stands there, on four ranks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.config import AioConfig

ROOT = Path(__file__).resolve().parents[1]
MODULE = "tests.test_readme"
RANKS = 4  # all of the pool: what the pages show uses the default group
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_output_of_the_readme_is_that_of_the_tutorial() -> None:
    """Which a test runs."""
    shown, ranks = blocks("README.md", "text"), blocks("docs/tutorials/first_training.md", "text")[1]
    assert len(shown) == 1 and ranks.endswith(shown[0])


class BigModel(nn.Module):
    """Called with a mapping's entries it returns an object with a loss; called with one tensor, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        outputs = self.head(self.body(inputs).tanh())
        loss = (outputs if target is None else outputs - target).float().square().mean()
        return loss if target is None else SimpleNamespace(loss=loss)


def run_block(world: World, code: str, page: str, names: dict[str, Any]) -> dict[str, Any]:
    names = {"torch": torch, "zero_ext": zero_ext, **names}
    exec(compile(code, page, "exec"), names)
    return names


def batches(world: World) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(world.rank)
    return [{"inputs": torch.randn(2, 4, generator=generator), "target": torch.zeros(2, 2)} for _ in range(3)]


def added_lines(diff: str) -> str:
    """The text after the change."""
    remaining = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(remaining) + "\n"


def first_page(world: World, folder: str) -> None:
    os.chdir(folder)
    (diff,) = blocks("README.md", "diff")
    named = {"MyModel": BigModel, "loader": batches(world)}
    names = run_block(world, added_lines(diff), "README.md", named)
    assert isinstance(names["model"], zero_ext.ZeroModule) and names["loss"].isfinite()
    assert zero_ext.zero.engine_of(names["model"]).steps == 3


def all_else(world: World, folder: str) -> None:
    os.chdir(folder)
    code = next(block for block in blocks("docs/reference/calls.md") if "zero_ext.Init" in block)
    named = {
        "BigModel": BigModel,
        "config": {"stage": 3},
        "batch": batches(world)[0],
        "loader": SimpleNamespace(state_dict=dict),
        "scheduler": SimpleNamespace(state_dict=dict),
    }
    names = run_block(world, code, "docs/reference/calls.md", named)
    assert not names["state"]["head.weight"].any() and names["state"]["body.weight"].any()
    assert (Path(folder) / "checkpoints" / "latest").exists()


def engine_loop(world: World, folder: str) -> None:
    os.chdir(folder)
    code = next(block for block in blocks("docs/reference/calls.md") if "initialize" in block)
    data = [{"inputs": torch.randn(4), "target": torch.zeros(2)} for _ in range(16)]
    names = run_block(world, code, "docs/reference/calls.md", {"model": BigModel(), "data": data})
    assert names["engine"].global_steps == 2


def for_deepspeed_users(world: World, folder: str) -> None:
    os.chdir(folder)
    first, report, auto = blocks("docs/how_to/deepspeed.md")
    named = {"model": BigModel(), "dataset": [torch.randn(4) for _ in range(64)]}
    names = run_block(world, first, "docs/how_to/deepspeed.md", named)
    assert names["engine"].global_steps == 4
    with contextlib.redirect_stdout(None):
        names = run_block(world, report, "docs/how_to/deepspeed.md", {})
    assert names["translation"].config.stage == 3
    open_values = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    open_values["train_micro_batch_size_per_gpu"] = "auto"  # type: ignore[assignment]
    loaded: list[Any] = []
    named = {
        "path": open_values,
        "load_deepspeed_config": lambda *args, **settings: loaded.append(
            zero_ext.config.deepspeed.load_deepspeed_config(*args, **settings)
        ),
    }
    run_block(world, auto, "docs/how_to/deepspeed.md", named)
    assert loaded[0].config.batch.micro_batch_size == 4
    assert loaded[0].config.optimizer.params["lr"] == 3e-4


def about_checkpoints(world: World, folder: str) -> None:
    os.chdir(folder)
    model = BigModel()
    model, optimizer = zero_ext.prepare(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    code = blocks("docs/how_to/checkpoints.md")[0]
    named = {"model": model, "scheduler": scheduler, "print": lambda *_: None}
    names = run_block(world, code, "docs/how_to/checkpoints.md", named)
    assert names["loaded"].step == 0 and names["handle"].done()


def generation(world: World, folder: str) -> None:
    from transformers import LlamaConfig

    os.chdir(folder)
    (code,) = (code for code in blocks("docs/explanation/offload.md") if "model.generate" in code)
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    shape = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, eos_token_id=None)
    (Path(folder) / f"nvme-{world.rank}").mkdir()
    named = {"shape": shape, "prompt": torch.arange(4 + world.rank).unsqueeze(0)}
    with mock.patch.object(zero_ext, "load_checkpoint"):  # random weights do
        code = code.replace("/nvme", f"nvme-{world.rank}")
        names = run_block(world, code, "docs/explanation/offload.md", named)
    assert names["ids"].shape == (1, 12 + world.rank)
    del names["model"]
    gc.collect()


def restored(world: World, page: str, folder: str) -> None:
    """One page's code on one rank, which is left where it was."""
    before = Path.cwd()
    try:
        globals()[page](world, folder)
        world.barrier()
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "page",
    ["first_page", "all_else", "engine_loop", "for_deepspeed_users", "about_checkpoints", "generation"],
)
def test_the_code_runs(rank_pool: RankPool, tmp_path: Path, page: str) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    rank_pool.run(RANKS, f"{MODULE}:restored", {"page": page, "folder": str(tmp_path)})


def test_configuration_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = blocks("docs/reference/configuration.md")[0]
    exec(compile(code, "docs/reference/configuration.md", "exec"), {})


def test_the_section_for_nvme_is_one_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(blocks("docs/how_to/nvme.md", "json")[0])
    config = zero_ext.load_config(tmp_path / "config.json")
    assert config.offload.any_nvme and config.aio == AioConfig()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
