"""Checkpoints of engines: any ranks, stage and optimizer to any other, bit for bit, and on from there."""

from __future__ import annotations

import itertools
import random
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zero_ext
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.models import TinyModel
from zero_ext.checkpoint.weights.hf_export import export_huggingface
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources

MODULE = "tests.checkpoint.test_engine_checkpoint"
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95)),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adamw backwards": lambda params: torch.optim.AdamW([*params][::-1], lr=1e-2, betas=(0.8, 0.95)),
    "adamw in two groups": lambda params: torch.optim.AdamW(
        [{"params": half} for half in (lambda all: (all[:3], all[3:]))([*params])], lr=1e-2
    ),
}


class Mixture(nn.Module):
    """Tied and frozen weights, channels_last, dropout, buffers of all kinds, a weight that is never used."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.language = TinyModel(layers=2, tied=True)
        self.conv = nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(width, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(7, 2))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        seen = self.frozen(self.drop(self.norm(self.conv(images)).mean((2, 3))))
        logits = self.drop(self.language(ids)).float()
        return logits.square().mean() + seen.float().square().mean()


def batch_of(world: World, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1000 + step * 10 + world.rank)
    return torch.randint(0, 23, (2, 5), generator=generator), torch.randn(2, 3, 4, 4, generator=generator)


class Training:
    """A prepared model with optimizer and scheduler, built from ``seed``."""

    def __init__(self, world: World, stage: int, dtype: str, optimizer: str, seed: int, **more: Any) -> None:
        torch.manual_seed(seed)
        model = Mixture(**more)
        trained = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
        config = {
            "stage": stage,
            "timeout_seconds": 120.0,
            "gradient_clipping": 1.0,
            "precision": {"dtype": dtype},
            "units": {"bucket_elements": 500},
        }
        self.world = world
        self.model, self.optimizer = zero_ext.prepare(model, trained, config, process_group=world.group)
        self.scheduler = StepLR(self.optimizer, step_size=2, gamma=0.7)
        torch.manual_seed(seed + world.rank + 1)  # dropout differs between the ranks

    def run(self, seed: int, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            loss = self.model(*batch_of(self.world, seed, step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Every state full tensor by kind and name, put together from all ranks' slices; and buffers."""
        state = checkpoint_sources(engine_of(self.model)).own
        mine = [(p.kind, p.name, p.start, p.tensor.tolist()) for p in state.save_slices()]
        slices: dict[str, list[tuple[int, list[float]]]] = {}
        for kind, name, start, values in itertools.chain(*self.world.everyone(mine)):
            slices.setdefault(f"{kind} {name}", []).append((start, values))
        full = {}
        for key, runs in slices.items():
            values = torch.tensor(list(itertools.chain(*(values for _, values in sorted(runs)))))
            shape = state.parameter_table()[key.partition(" ")[2]].shape
            assert values.numel() == torch.Size(shape).numel(), key
            full[key] = values
        buffers = {f"buffer {name}": buffer.clone() for name, buffer in state.buffers().items()}
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return {**full, **buffers, "lr": rates, "steps": torch.tensor(engine_of(self.model).steps)}


def save_on_rank(world: World, directory: str, seed: int, background: bool, **setting: Any) -> dict[str, Any]:
    training = Training(world, seed=seed, **setting)
    training.run(seed, 0, 3)
    state = training.state()
    handle = zero_ext.save_checkpoint(
        directory, training.model, scheduler=training.scheduler, client_state="mine", async_save=background
    )
    losses = training.run(seed, 3, 3)  # while a background save may still be writing
    handle.wait()
    return {"state": state, "losses": world.everyone(losses), "after": training.state()}


def load_on_rank(world: World, directory: str, seed: int, **setting: Any) -> dict[str, Any]:
    training = Training(world, seed=seed + 1000, **setting)
    training.run(seed + 1000, 0, 1)  # its own state, which must go
    scratch = training.model.scratch.clone()
    loaded = zero_ext.load_checkpoint(directory, training.model, scheduler=training.scheduler)
    assert loaded.step == 3 and loaded.client_state == "mine"
    assert torch.equal(training.model.scratch, scratch)
    state = training.state()
    return {"state": state, "losses": world.everyone(training.run(seed, 3, 3)), "after": training.state()}


def check_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"


SEED = secrets.randbits(20)
WORLDS = list(itertools.product((1, 2, 3, 4), repeat=2))
STAGES = random.Random(SEED).sample(list(itertools.product(range(4), repeat=2)), 16)
KINDS = random.Random(SEED).sample(
    [*itertools.product(("adamw", "momentum", "adagrad", "adam", "amsgrad"), ("fp32", "bf16"))] * 2, 16
)


@pytest.mark.by_turns()
@pytest.mark.parametrize("number", range(16))
def test_any_engine_to_any_other(rank_pool: RankPool, tmp_path: Path, number: int) -> None:
    (saved_at, loaded_at), (saved, wanted), (optimizer, dtype) = WORLDS[number], STAGES[number], KINDS[number]
    print(f"seed {SEED}: {saved_at} -> {loaded_at} ranks, stage {saved} -> {wanted}, {optimizer}, {dtype}")
    common = {"directory": str(tmp_path), "seed": SEED, "optimizer": optimizer, "dtype": dtype}
    before = rank_pool.run(
        saved_at, f"{MODULE}:save_on_rank", {**common, "stage": saved, "background": number % 2 == 0}
    )[0]
    after = rank_pool.run(loaded_at, f"{MODULE}:load_on_rank", {**common, "stage": wanted})[0]
    check_same(before["state"], after["state"])
    if saved_at == loaded_at and (dtype == "fp32" or saved == wanted or saved_at == 1):
        assert after["losses"] == before["losses"]
        check_same(before["after"], after["after"])


@pytest.mark.by_turns()
@pytest.mark.parametrize("stage", range(4))
def test_a_resume_is_bit_exact(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    for optimizer, dtype in (("adamw", "bf16"), ("momentum", "fp32")):
        common = {"directory": str(tmp_path / dtype), "seed": SEED + stage, "stage": stage}
        common |= {"optimizer": optimizer, "dtype": dtype}
        before = rank_pool.run(2, f"{MODULE}:save_on_rank", {**common, "background": True})[0]
        after = rank_pool.run(2, f"{MODULE}:load_on_rank", common)[0]
        assert len({loss for own in before["losses"] for loss in own}) == 6  # dropout and data differ
        assert after["losses"] == before["losses"]
        check_same(before["after"], after["after"])


def refuse_on_rank(world: World, directory: str) -> None:
    setting = {"stage": 3, "dtype": "fp32", "optimizer": "adamw"}
    saved = Training(world, seed=1, **setting)
    saved.run(1, 0, 2)
    zero_ext.save_checkpoint(directory, saved.model)

    class Stateful:
        def __init__(self) -> None:
            self.state = {"at": 1}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if "at" not in state:
                raise ValueError("no such state")
            self.state = state

    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"width": 6}, {}, r"'conv.weight': expected shape \[6, 3, 3, 3\], got \[5, 3, 3, 3\]"),
        ({"optimizer": "momentum"}, {}, r"asks for nothing of it\. Use the optimizer that it was saved with"),
        ({"optimizer": "amsgrad"}, {}, "such as amsgrad"),
        ({"optimizer": "adamw in two groups"}, {}, r"groups of \[3, \d+\] parameters, got groups of \[\d+\]"),
        ({"optimizer": "adam"}, {}, "expected state of Adam, got that of AdamW"),
        ({}, {"loader": Stateful()}, "holds no loader state"),
        ({}, {"step": 7}, "step-000007"),
    ]
    for change, arguments, pattern in cases:
        training = Training(world, seed=2, **{**setting, **change})
        if arguments:
            training.run(2, 0, 1)  # else the optimizer has made no state yet
        before, random_state = training.state(), torch.get_rng_state()
        with pytest.raises(Exception, match=pattern) as caught:
            zero_ext.load_checkpoint(directory, training.model, scheduler=None, **arguments)
        assert len(set(world.everyone(type(caught.value).__name__))) == 1
        check_same(before, training.state())
        assert torch.equal(torch.get_rng_state(), random_state)
        training.run(2, 1, 1)
    stateful = Stateful()
    zero_ext.save_checkpoint(directory, saved.model, loader=stateful, scheduler=saved.scheduler, step=9)
    other = Training(world, seed=2, **{**setting, "width": 6})
    stateful.state = {"at": 5}
    rates = dict(other.scheduler.state_dict())
    with pytest.raises(ValueError, match="does not fit this model"):
        zero_ext.load_checkpoint(directory, other.model, loader=stateful, scheduler=other.scheduler)
    assert stateful.state == {"at": 5} and other.scheduler.state_dict() == rates
    with pytest.raises(ValueError, match="expected a prepared one"):
        zero_ext.load_checkpoint(directory, nn.Linear(2, 2))


def test_the_order_within_a_param_group_may_differ(rank_pool: RankPool, tmp_path: Path) -> None:
    setting = {"directory": str(tmp_path), "seed": SEED, "stage": 2, "dtype": "fp32"}
    saved = rank_pool.run(
        1, f"{MODULE}:save_on_rank", {**setting, "optimizer": "adamw", "background": False}
    )[0]
    loaded = rank_pool.run(1, f"{MODULE}:load_on_rank", {**setting, "optimizer": "adamw backwards"})[0]
    check_same(saved["state"], loaded["state"])
    assert saved["losses"][0] == pytest.approx(loaded["losses"][0], rel=1e-6)


def test_what_does_not_fit_is_refused_on_all_ranks_with_nothing_changed(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(2, f"{MODULE}:refuse_on_rank", {"directory": str(tmp_path)})


def use_on_rank(world: World, directory: str) -> None:
    """Saved in training, loaded without an optimizer."""
    setting = {"stage": 2, "dtype": "bf16", "optimizer": "adamw"}
    training = Training(world, seed=3, **setting)
    training.run(3, 0, 2)
    zero_ext.save_checkpoint(directory, training.model, keep_last=1)
    wanted = zero_ext.full_state_dict(training.model)
    model = Mixture()
    model, optimizer = zero_ext.prepare(
        model, None, {"stage": 3, "precision": {"dtype": "bf16"}}, process_group=world.group, init="skip"
    )
    assert optimizer is None
    zero_ext.load_checkpoint(directory, model)
    found = zero_ext.full_state_dict(model)
    for name in checkpoint_sources(engine_of(model)).own.buffers() if world.rank else ():
        del wanted[name], found[name]  # the first rank's are saved
    check_same(wanted, found)
    with torch.no_grad():
        assert model(*batch_of(world, 3, 0)).isfinite()


def test_a_checkpoint_of_training_loads_for_use(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, f"{MODULE}:use_on_rank", {"directory": str(tmp_path)})


def write_on_rank(world: World, directory: str) -> None:
    """Replicated parameters may be written to in place; a save right after holds what was written."""
    for stage in (0, 1, 2):
        made = []
        for _ in range(2):
            model: Any = TinyModel(layers=1)
            config = {"stage": stage, "precision": {"dtype": "bf16"}}
            made.append(
                zero_ext.prepare(
                    model, torch.optim.AdamW(model.parameters()), config, process_group=world.group
                )
            )
        (written, optimizer), (loaded, _) = made
        with torch.no_grad():
            for parameter in written.parameters():
                parameter.add_(1.0)
        masters = [value for name, value in optimizer.state_dict()["shards"].items() if "master/head" in name]
        assert all(value.mean() > 0.5 for value in masters)
        with torch.no_grad():
            for parameter in written.parameters():
                parameter.add_(1.0)
        wanted = zero_ext.full_state_dict(written)
        zero_ext.save_checkpoint(directory, written)
        zero_ext.load_checkpoint(directory, loaded)
        check_same(wanted, zero_ext.full_state_dict(loaded))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_written_in_place_is_saved(rank_pool: RankPool, tmp_path: Path, world_size: int) -> None:
    rank_pool.run(world_size, f"{MODULE}:write_on_rank", {"directory": str(tmp_path)})


def llama_on_rank(world: World, directory: str, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, tie_word_embeddings=tied, **sizes
    )
    with zero_ext.Init(process_group=world.group):
        model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"stage": 3, "precision": {"dtype": "bf16"}}
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    ids = torch.randint(0, 37, (2, 6))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    zero_ext.save_checkpoint(directory, model)
    full = zero_ext.full_state_dict(model)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    if world.rank == 0:
        out = Path(directory) / "exported"
        assert len(export_huggingface(directory, out, None, 3000)) > 2  # several files and their index
        shape.save_pretrained(out)
        read, problems = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(problems.values()), problems
        check_same(full, dict(read.state_dict()))
        with torch.no_grad():
            assert torch.equal(read.eval()(input_ids=ids).logits, logits)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_export(rank_pool: RankPool, tmp_path: Path, tied: bool) -> None:
    rank_pool.run(2, f"{MODULE}:llama_on_rank", {"directory": str(tmp_path), "tied": tied})
