"""The Python blocks of the pages about other libraries run as written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments

import zero_ext
from tests.docs.snippets import snippets_of
from tests.integrations.ray.training import local_cluster
from tests.integrations.transformers.models import Sentences, llama
from tests.integrations.trl.data import sentences, tokenizer
from zero_ext.integrations.transformers import ZeroTrainerMixin
from zero_ext.zero import engine_of


class Square(LightningModule):
    """What the page on Lightning calls module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.batches: list[torch.Tensor] = []
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.linear(batch).float().square().mean()
        self.batches.append(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def losses_in_plain_torch(module: Square, batches: list[torch.Tensor]) -> list[float]:
    """Train as the page's Trainer does, without Lightning's loop and in one process."""
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module.training_step(batch, index)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module.losses


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which Lightning, TRL and others choose where to write."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


def test_lightning_and_ray(folder: Path, cluster: None) -> None:
    batches = list(torch.randn(8, 3, 4))
    module = Square()
    plain = copy.deepcopy(module)
    with snippets_of("how_to/lightning.md") as page:
        one_epoch = {"devices=8": "devices=1, max_epochs=1"}  # 1000 without a number
        page.run_next(one_epoch, module=module, loader=DataLoader(batches, batch_size=None))
        assert len(module.losses) == 8
        assert module.losses == pytest.approx(
            losses_in_plain_torch(plain, module.batches), rel=0.02, abs=2e-3
        )

        configure = page.run_next(BigModel=lambda size: nn.Linear(size, size))["configure_model"]
        built = SimpleNamespace(model=None, hparams=SimpleNamespace(size=3))
        configure(built)
        first = built.model
        configure(built)
        assert first.weight.shape == (3, 3) and built.model is first

        on_one = {"devices=8": 'devices=1, accelerator="cpu"'}
        data = DataLoader(batches, batch_size=None)
        page.run_next(on_one, torch=torch, BigModel=lambda size: nn.Linear(size, size), size=4, loader=data)
        assert engine_of(page.names["model"].module).steps == 8
        assert page.names["fabric"].load("run") == {"epoch": 1}

        sizes = {"num_workers=8, use_gpu=True": "num_workers=2", '"/shared/runs"': repr(str(folder))}
        page.run_next(
            sizes,
            torch=torch,
            dist=dist,
            zero_ext=zero_ext,
            build_model=build_model,
            dataset=[each[0] for each in batches],
        )
        assert list((folder / "run").glob("checkpoint-*"))


def test_accelerate(folder: Path) -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader([(torch.randn(4), torch.randn(2)) for _ in range(8)], batch_size=2)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with snippets_of("how_to/accelerate.md") as page:
        on_cpu = {'mixed_precision="bf16",': 'mixed_precision="bf16", cpu=True,'}
        page.run_next(on_cpu, **names, loss_function=nn.functional.mse_loss)
        assert engine_of(page.names["model"]).steps == 2
        page.names["accelerator"].load_state("state")
        saved = build_model()
        load_checkpoint_in_model(saved, "weights")
        assert not torch.equal(saved.weight, build_model().weight)

        AcceleratorState._reset_state(True)
        on_one_rank = {
            "cp_size=2": "cp_size=1",
            "accelerator = ZeroAccelerator(": "accelerator = ZeroAccelerator(cpu=True, ",
        }
        language = llama(0)
        weights = torch.optim.AdamW(language.parameters(), lr=0.1)
        sentences_loader = DataLoader(Sentences(4, 1), batch_size=2)
        page.run_next(on_one_rank, model=language, optimizer=weights, loader=sentences_loader)
        assert float(page.names["loss"]) > 0

        AcceleratorState._reset_state(True)
        plain = {"zero_ext": zero_ext, "Accelerator": lambda **kw: Accelerator(cpu=True, **kw)}
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        page.run_next(**plain, model=model, optimizer=optimizer, loader=loader)


def test_peft_and_trl(folder: Path) -> None:
    config = llama(0).config
    config.vocab_size, config.pad_token_id = 16, 0
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    tokenizer().save_pretrained("base")
    model = AutoModelForCausalLM.from_pretrained("base")
    with snippets_of("how_to/peft.md") as page:
        on_cpu = {'SFTConfig("out")': 'SFTConfig("out", use_cpu=True, bf16=False, report_to=[])'}
        page.run_next(on_cpu, model=model, data=sentences(8, 1))
        assert (folder / "adapter" / "adapter_model.safetensors").exists()

        page.run_next(peft=peft, torch=torch, base=llama(1))
    restored = peft.PeftModel.from_pretrained(llama(1), "adapter")
    assert any("lora_A" in name for name, _ in restored.named_parameters())


def test_transformers(folder: Path) -> None:
    with snippets_of("how_to/transformers.md") as page:
        page.run_next({"bf16=True": "bf16=True, use_cpu=True"}, model=llama(0), data=Sentences(8, 1))
        assert page.names["trainer"].state.global_step > 0
        read = AutoModelForCausalLM.from_pretrained(folder / "out" / "model")

        mixed = page.run_next(Seq2SeqTrainer=Seq2SeqTrainer)["MyTrainer"]
        assert issubclass(mixed, ZeroTrainerMixin) and issubclass(mixed, Trainer)

        plain = Trainer(llama(0), TrainingArguments("built", report_to=[], use_cpu=True))
        page.run_next({"SomeTrainer(...)": "plain"}, zero_ext=zero_ext, plain=plain)
        assert isinstance(plain, ZeroTrainerMixin) and page.names["trainer"] is plain

        on_one_rank = {"cp_size=4": "cp_size=1", '"out", ': '"out", use_cpu=True, report_to=[], '}
        page.run_next(on_one_rank, model=llama(0), data=Sentences(8, 1))
        assert page.names["trainer"].zero_config.parallel.cp == 1

        names = {"AutoModelForCausalLM": AutoModelForCausalLM, "zero_config": {"stage": 3}}
        arguments = TrainingArguments("out", report_to=[], use_cpu=True, max_steps=1, learning_rate=0.0)
        page.run_next({"folder/with/safetensors": "out/model"}, **names, args=arguments)
        page.names["trainer"].train()
        loaded = zero_ext.full_state_dict(page.names["model"])

        prompts = {"input_ids": torch.arange(3, 6)[None]}
        page.run_next({"=128": "=4"}, prompts=prompts)
        assert page.names["samples"].shape == (1, 7)
    assert all(torch.equal(value, loaded[name].to(value.dtype)) for name, value in read.state_dict().items())
