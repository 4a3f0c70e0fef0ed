"""The Python blocks of the pages run as written, and do what the pages say."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer.main
from torch import nn

import zero_ext
from tests.cli.test_help import leaves
from tests.docs.run_page import ROOT
from tests.docs.snippets import pages_with_snippets, snippets_of
from tests.integrations.deepspeed_checkpoint.forged import Forged
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.cli import app
from zero_ext.data import ShardedLoader
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule
from zero_ext.zero import engine_of

FOLDERS = (ROOT / "tests" / "docs", ROOT / "tests" / "integrations")


class Masked(nn.Module):
    """A block that takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return hidden + self.linear(hidden if mask is None else hidden * mask).tanh()


class Stack(nn.Module):
    """What a page about activations calls model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(3))
        self.method: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = Stack.plain

    def plain(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return hidden

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.method(self, hidden, mask)


def test_every_page_with_snippets_is_run_by_a_test() -> None:
    texts = [path.read_text() for folder in FOLDERS for path in folder.rglob("test_*.py")]
    for page in pages_with_snippets():
        name = Path(page).name
        assert any(f'"{page}"' in text or f'"{name}"' in text for text in texts), f"no test runs {page}"


def test_commands_on_the_pages_exist_with_their_options() -> None:
    commands = dict(leaves(typer.main.get_command(app)))
    lines = [
        line
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for line in re.sub(r"\\\n *", " ", page.read_text()).splitlines()
        if re.match(r" *(?:[A-Z_]+=\S+ )*zero-ext [a-z]", line)
    ]
    assert len(lines) > 30
    for line in lines:
        words = shlex.split(line, comments=True)
        words = words[words.index("zero-ext") + 1 :]
        path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in commands), None)
        assert path is not None, f"no such command: {line}"
        known = {name for each in commands[path].params for name in (*each.opts, *each.secondary_opts)}
        unknown = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)} - known
        # What follows a script is the script's own.
        assert not unknown or any(word.endswith(".py") for word in words), f"{unknown}: {line}"


def test_a_block_that_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(
        "```python\na = 1\n```\n\n- b\n\n  ```python\n  a += b\n  ```\n"
    )
    monkeypatch.setattr("tests.docs.snippets.ROOT", tmp_path)
    with snippets_of("page.md") as page:
        page.run_next()
        assert page.run_next(b=2)["a"] == 3
    with pytest.raises(AssertionError, match="1 blocks were not run"), snippets_of("page.md") as page:
        page.run_next()


@on_ranks(4)
def test_activation(world: World) -> None:
    torch.manual_seed(world.seed)
    model, hidden, mask = Stack(), torch.randn(2048, 8), torch.rand(2048, 8)
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    alone = [dist.new_group([rank]) for rank in range(4)][world.rank]
    names = {"nn": nn, "zero_ext": zero_ext, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with snippets_of("how_to/activation.md") as page:
        layers = page.run_next(model=model, **names)["Layers"]
        model.method = layers.forward
        checkpointed = model(hidden, mask)
        assert torch.equal(checkpointed, plain(hidden, mask))
        # The mask is moved as well, with the first of three calls.
        assert engine_of(model).checkpointing.used_bytes() == 4 * hidden.nbytes
        checkpointed.sum().backward()
        assert engine_of(model).checkpointing.used_bytes() == 0

        names = {"data_parallel": alone, "tensor_parallel": world.group}
        model = Stack()
        model.method = layers.forward
        page.run_next(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **names)
        checkpointed = model(hidden, mask)
        assert engine_of(model).checkpointing.used_bytes() == 4 * hidden.nbytes / world.size

        block = Masked()
        names = page.run_next(block=block, hidden=hidden, batch=hidden, model=nn.Identity())
        torch.testing.assert_close(names["hidden"], block(hidden))
        assert names["checkpointing"].used_bytes() == hidden.nbytes

        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
        )
        llama = LlamaForCausalLM(config)
        page.run_next(model=llama)
        zero_ext.prepare(llama, None, {"stage": 3, "activation_checkpointing": {"tier": "host"}})
        llama(input_ids=torch.arange(64)[None] % 32).logits.sum().backward()
        assert engine_of(llama).checkpointing.allocated_bytes()["host"] > 0

        page.run_next(
            model=llama,
            seed=world.seed,
            tensor_parallel_rank=world.rank,
            dropout=nn.Dropout(0.5),
            inner=torch.ones(64),
        )
        dropped = world.everyone(page.names["inner"].tolist())
        assert all(one != other for one, other in itertools.pairwise(dropped))


def test_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    model, optimizer = zero_ext.prepare(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with snippets_of("how_to/checkpoints.md") as page:
        page.run_next(model=model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert capsys.readouterr().out.startswith("1 ")


class Imported(nn.Module):
    """The model of the checkpoint that is imported."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.tied = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.tied.weight = self.a.weight
        self.b, self.empty = nn.Linear(11, 3, bias=False), nn.Linear(0, 1)
        self.empty.weight = None
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(5, 3), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(4, dtype=torch.int64))


def test_import_of_deepspeed_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forged = Forged(2, 2)
    forged.write(tmp_path / "runs" / "mine")
    model = Imported()
    decayed = [model.a.weight, model.b.weight, model.empty.bias]
    optimizer = torch.optim.Adam([{"params": decayed}, {"params": [model.a.bias, model.scale]}])
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
    with snippets_of("how_to/deepspeed_checkpoints.md") as page:
        names = page.run_next(zero_ext=zero_ext, model=model, scheduler=None)
    assert names["loaded"].step == names["found"].step == 7
    assert torch.equal(zero_ext.full_state_dict(model)["a.weight"], forged.held["master a.weight"])


def test_deepspeed_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    dataset = list(torch.randn(64, 4))
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "auto.json").write_text(json.dumps(auto))
    resolved = json.loads(json.dumps(auto).replace('"auto"', "2"))
    (tmp_path / "ds_config.json").write_text(json.dumps(resolved))
    loss = type("Loss", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x).square().mean()})
    with snippets_of("how_to/deepspeed.md") as page:
        assert page.run_next(model=loss(4, 2), dataset=dataset)["engine"].global_steps > 0
        assert page.run_next()["translation"].config.stage == 3
        page.run_next(path="auto.json")
    with snippets_of("reference/deepspeed_api.md") as page:
        assert page.run_next(model=loss(4, 2))["engine"].zero_optimization_stage() == 3
        page.leave_next()  # the pipeline of test_deepspeed_pipelines.py


def test_muon() -> None:
    with snippets_of("how_to/muon.md") as page:
        names = page.run_next(zero_ext=zero_ext, model=nn.Linear(3, 2))
    assert [group["use_muon"] for group in names["optimizer"].param_groups] == [True, False]


def test_one_bit() -> None:
    with snippets_of("how_to/one_bit.md") as page:
        names = page.run_next(zero_ext=zero_ext, model=nn.Linear(3, 2))
    assert engine_of(names["model"]).config.stage == 1


def test_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"stage": 2, "batch": {"micro_batch_size": 3}}')
    model = nn.Linear(3, 2)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with snippets_of("how_to/planner.md") as page:
        found = page.run_next(zero_ext=zero_ext, make_loader=lambda size: [size] * 4, **names)
    assert found["batch"] == 3


def test_sparse_attention() -> None:
    query = torch.randn(2, 2, 2048, 16)
    with snippets_of("how_to/sparse_attention.md") as page:
        assert page.run_next(query=query, key=query, value=query)["out"].shape == query.shape

        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
        )
        model = BertModel(config)
        page.run_next(model=model)
        assert model.embeddings.position_embeddings.weight.shape == (16_384, 32)
        assert model(input_ids=torch.zeros(1, 700, dtype=torch.int64)).last_hidden_state.isfinite().all()

        out = page.run_next(torch=torch)["attention"](query, query, query)
    dense = page.names["mask"].repeat_interleave(64, 0).repeat_interleave(64, 1)
    expected = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=dense)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_offload(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    # Random weights may otherwise end the text early.
    shape = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
    trained, _ = zero_ext.prepare(LlamaForCausalLM(shape), None, {"stage": 3, "precision": {"dtype": "bf16"}})
    zero_ext.save_checkpoint(tmp_path / "checkpoints", trained)
    with snippets_of("explanation/offload.md") as page:
        folders = {'"/nvme"': repr(str(tmp_path)), '"checkpoints"': repr(str(tmp_path / "checkpoints"))}
        names = page.run_next(folders, shape=shape, prompt=torch.arange(4)[None])
        assert names["ids"].shape == (1, 12)
        config = {"stage": 3, "offload": {"optimizer": "host"}}
        made = page.run_next(config=config, Model=LlamaForCausalLM, settings=shape)["model"]
        state = zero_ext.full_state_dict(made)
        from safetensors.torch import save_file

        (tmp_path / "folder").mkdir()
        save_file(state, tmp_path / "folder" / "model.safetensors")
        loaded = page.run_next({'"folder"': repr(str(tmp_path / "folder"))})["model"]
    assert all(torch.equal(value, state[name]) for name, value in zero_ext.full_state_dict(loaded).items())


class Tokens(nn.Module):
    """A model with a head whose loss comes with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.head(self.body(x).tanh()).square().mean())


@on_ranks(4)
def test_calls(world: World) -> None:
    torch.manual_seed(world.seed)
    folder = world.shared_folder()
    batches = [{"x": torch.randn(4)} for _ in range(8)]
    resolved = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    inputs = torch.randn(16, 4)
    with snippets_of("reference/calls.md") as page, contextlib.chdir(folder):
        loader = ShardedLoader(batches, 1, seed=1)
        names = {"zero_ext": zero_ext, "torch": torch, "config": {"stage": 3}, "BigModel": Tokens}
        page.run_next(**names, batch=batches[0], scheduler=None, loader=loader)
        assert page.names["state"]["head.weight"].count_nonzero() == 0
        if world.rank == 0:
            Path("ds_config.json").write_text(json.dumps(resolved))
        world.barrier()
        assert page.run_next(model=Tokens(), data=batches)["engine"].global_steps > 0
        query = torch.randn(2, 2, 128, 16)
        names = {"query": query, "key": query, "value": query, "layer": nn.Linear(4, 4), "hidden": inputs}
        page.run_next(**names, network=nn.Linear(4, 4))
        assert page.names["out"].shape == query.shape
        expected = page.names["network"](page.names["layer"](inputs))
        torch.testing.assert_close(page.names["hidden"], expected)
        names = {"make_mesh": make_mesh, "PipelineModule": PipelineModule, "Pipeline": Pipeline}
        page.run_next(
            **names, layers=layers, cross_entropy=nn.functional.mse_loss, inputs=inputs, targets=inputs
        )
        assert page.names["loss"].isfinite()


def test_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with snippets_of("reference/configuration.md") as page:
        page.run_next()
