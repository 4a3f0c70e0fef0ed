"""An Accelerate script with every kind of loop, run with Accelerator and with ZeroAccelerator:
``zero_script.py OUT_FOLDER`` under ``accelerate launch``."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_ext

HOST = {"params": "host", "grads": "host", "optimizer": "host"}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)},
    "host": {"stage": 3, "offload": HOST},
    "nvme": {"stage": 3, "offload": dict.fromkeys(HOST, "nvme")},
}
STEPS, SAMPLES, BATCH = 2, 38, 4


class Net(nn.Sequential):
    def __init__(self) -> None:
        set_seed(7)
        # A bias before a norm has no true gradient, only rounding errors that Adam makes large.
        norm = nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24)
        super().__init__(*norm, nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 3))
        self[3].bias.requires_grad_(False)


def loader(shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    tensors = (
        torch.randn(SAMPLES, 12, generator=generator),
        torch.randn(SAMPLES, 3, generator=generator),
    )
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH, shuffle=shuffle)


def made(shuffle: bool = True) -> tuple[Any, ...]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7), loader(shuffle)


def epoch(accelerator: Any, prepared: Any, batches: Any, found: dict[str, Any], clip: bool = True) -> None:
    model, optimizer, scheduler, _ = prepared
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.05)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.2)
                found.setdefault("norms", []).append(float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.setdefault("losses", []).append(mean_of(accelerator, loss))
        found.setdefault("rates", []).append(scheduler.get_last_lr()[0])


def mean_of(accelerator: Any, loss: torch.Tensor) -> float:
    return float(accelerator.gather(loss.detach().reshape(1)).mean())


def outputs_of(accelerator: Any, model: Any, batches: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in batches]
    model.train()
    return torch.cat(outputs).flatten().tolist()


def train(accelerator: Any, folder: Path) -> dict[str, Any]:
    """A loop with everything, prepared in an unusual order, then its weights."""
    model, optimizer, scheduler, batches = made()
    ordered = accelerator.prepare(scheduler, batches, optimizer, model)
    scheduler, batches, optimizer, model = ordered
    found: dict[str, Any] = {}
    for _ in range(2):
        epoch(accelerator, (model, optimizer, scheduler, None), batches, found)
        found.setdefault("outputs", []).extend(outputs_of(accelerator, model, batches))
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    found["type"] = type(inner).__name__
    accelerator.save_model(model, folder, max_shard_size="1KB")
    accelerator.save_model(inner, folder / "pickled", safe_serialization=False)
    values = accelerator.get_state_dict(model)
    found["weights"] = {name: value.tolist() for name, value in (values or {}).items()}
    found["freed"] = accelerator.free_memory(model, optimizer) == [None, None]
    return found


def no_sync(accelerator: Any, _: Path) -> dict[str, Any]:
    """Accumulation by hand, whose last gradients are left over at the end of an epoch."""
    model, optimizer, scheduler, batches = accelerator.prepare(*made())
    losses = []
    for _ in range(2):
        for step, (inputs, labels) in enumerate(batches):
            local = accelerator.no_sync(model) if step % STEPS else accelerator.autocast()
            with local:
                loss = nn.functional.mse_loss(model(inputs), labels)
                accelerator.backward(loss)
            if step % STEPS == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
        outputs_of(accelerator, model, batches)
    return {"losses": losses}


def adversaries(accelerator: Any, _: Path) -> dict[str, Any]:
    """Two models, each with an optimizer, in one call, and a third one that nothing trains."""
    set_seed(5)
    maker, critic = nn.Linear(4, 12), nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    frozen = nn.Linear(12, 12).requires_grad_(False)
    for_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
    for_maker = torch.optim.AdamW(maker.parameters(), lr=0.02)
    slower = torch.optim.lr_scheduler.ExponentialLR(for_critic, 0.9)
    loss_of, objects = nn.BCEWithLogitsLoss(), (critic, maker, for_maker, for_critic)
    critic, maker, for_maker, for_critic = accelerator.prepare(*objects)
    slower, batches = accelerator.prepare(slower, loader())
    if isinstance(accelerator, zero_ext.ZeroAccelerator):  # Accelerator puts them into DDP, which refuses
        frozen, loss_of = accelerator.prepare(frozen, loss_of)
    losses = []
    for real, _ in batches:
        ones, noise = torch.ones(len(real), 1), torch.randn(len(real), 4)
        for_critic.zero_grad()
        accelerator.backward(loss_of(critic(frozen(real)), ones))
        fake = maker(noise)
        accelerator.backward(loss_of(critic(frozen(fake.detach())), 0 * ones))
        for_critic.step()
        slower.step()
        for_maker.zero_grad()
        loss = loss_of(critic(frozen(fake)), ones)
        accelerator.backward(loss)
        for_maker.step()
        losses.append(mean_of(accelerator, loss))
    rates = [each.param_groups[0]["lr"] for each in (for_critic, for_maker)]
    return {"losses": losses, "rates": rates}


def trained_later(accelerator: Any, _: Path) -> dict[str, Any]:
    """A model that evaluates first and gets its optimizer in a later call, and then another one."""
    model, optimizer, scheduler, batches = made()
    model, batches = accelerator.prepare_model(model), accelerator.prepare_data_loader(batches)
    found: dict[str, Any] = {"outputs": outputs_of(accelerator, model, batches)}
    optimizer = accelerator.prepare_optimizer(optimizer)
    scheduler = accelerator.prepare_scheduler(scheduler)
    epoch(accelerator, (model, optimizer, scheduler, None), batches, found)
    return found


def muon(accelerator: Any, _: Path) -> dict[str, Any]:
    """Muon for the matrices and AdamW for the rest, as one optimizer."""
    model, _, _, batches = made()
    optimizer = zero_ext.Muon(model.parameters(), lr=0.02, adamw={"lr": 1e-2})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    prepared = accelerator.prepare(model, optimizer, scheduler, batches)
    found: dict[str, Any] = {}
    epoch(accelerator, prepared, prepared[3], found, clip=False)
    found["rates"] += [group["lr"] for group in prepared[1].param_groups]
    return found


def resume(accelerator: Any, folder: Path) -> dict[str, Any]:
    """Save in the middle of an epoch, go on, load, and go on again."""
    prepared = accelerator.prepare(*made(shuffle=False))  # Accelerate does not save an order of samples
    model, _, _, batches = prepared
    custom, calls = torch.optim.swa_utils.SWALR(torch.optim.SGD([torch.ones(1)], 0.5), 0.1), []
    accelerator.register_for_checkpointing(custom)
    accelerator.register_save_state_pre_hook(lambda models, weights, out: calls.append(len(models)))
    accelerator.register_save_state_pre_hook(lambda models, weights, out: [weights.pop() for _ in models])
    accelerator.register_load_state_pre_hook(lambda models, source: calls.append(-len(models)))
    found: dict[str, Any] = {"first": {}, "after": {}, "again": {}}
    epoch(accelerator, prepared, itertools.islice(batches, STEPS), found["first"])
    for _ in range(3):
        custom.step()
        accelerator.save_state()
    for phase in ("after", "again"):
        if phase == "again":
            accelerator.load_state()
        found[phase]["counts"] = [accelerator.step, custom.last_epoch]
        rest = accelerator.skip_first_batches(batches, STEPS)
        epoch(accelerator, prepared, rest, found[phase])
        found[phase]["noise"] = torch.randn(2).tolist()
        custom.step()
    found["calls"] = calls
    found["saved"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    accelerator.load_state(str(folder / "checkpoints" / "checkpoint_2"))
    values = accelerator.get_state_dict(model)
    found["weights"] = {name: value.tolist() for name, value in values.items()}
    return found


def overflow(accelerator: Any, _: Path) -> dict[str, Any]:
    """Gradients that fp16 cannot hold, then others."""
    model, optimizer, scheduler, batches = accelerator.prepare(*made())
    found: dict[str, Any] = {"skipped": [], "rates": [], "norms": []}
    for factor, (inputs, labels) in zip((1e9, 1.0, 1.0), batches, strict=False):
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                outputs = model(inputs)
                accelerator.backward(nn.functional.mse_loss(outputs, labels) * factor)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
                    found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found["skipped"].append(accelerator.optimizer_step_was_skipped)
        found["rates"].append(scheduler.get_last_lr()[0])
    found["dtypes"] = [str(outputs.dtype), str(next(model.parameters()).dtype), accelerator.mixed_precision]
    return found


def refusals(accelerator: Any, folder: Path) -> dict[str, Any]:
    """Errors that need several ranks, by what was done."""
    prepared = accelerator.prepare(*made())

    def local_sgd() -> None:
        with LocalSGD(accelerator=accelerator, model=prepared[0], local_sgd_steps=2):
            epoch(accelerator, prepared, prepared[3], {}, clip=False)

    def second() -> None:
        accelerator.prepare(torch.optim.SGD(prepared[0].parameters(), 0.1))

    def uneven() -> None:
        with accelerator.join_uneven_inputs([prepared[0]], even_batches=False):
            pass

    def elsewhere() -> None:
        accelerator.load_state(str(folder))

    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for attempt in (local_sgd, second, uneven, elsewhere):
        try:
            attempt()
            text = "no error"
        except (RuntimeError, ValueError) as error:
            text = str(error)
        found[attempt.__name__] = accelerator.gather_for_metrics([text], use_gather_object=True)
    return found


def main() -> None:
    out, found = Path(sys.argv[1]), {}

    def of(case: Callable[..., Any], name: str, **arguments: Any) -> None:
        folder = out / f"{case.__name__} {name}"
        kind = Accelerator if name == "plain" else zero_ext.ZeroAccelerator
        if case is resume:
            arguments["project_config"] = ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=True, total_limit=2
            )
        found[f"{case.__name__} {name}"] = case(kind(cpu=True, **arguments), folder)

    accumulating = {"gradient_accumulation_steps": STEPS}
    unused = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    for name, config in {"plain": None, **CONFIGS}.items():
        if name == "nvme":
            config = {**CONFIGS[name], "offload": {**CONFIGS[name]["offload"], "nvme_paths": [str(out)]}}
        own = {} if config is None else {"config": config}
        of(train, name, **accumulating, **own)
        if name in ("plain", "stage 1", "stage 3"):
            of(no_sync, name, **own)
            of(adversaries, name, **own, **unused)
            of(trained_later, name, **accumulating, **own)
            of(muon, name, **accumulating, **own)
        if config is not None:
            of(resume, name, **accumulating, config=config)
    for precision in ("fp16", "bf16"):
        of(overflow, precision, **accumulating, mixed_precision=precision, config={"stage": 3})
    of(refusals, "stage 3", **accumulating, config={"stage": 3})
    if Accelerator().is_main_process:
        (out / "found.json").write_text(json.dumps(found))
    Accelerator().end_training()


if __name__ == "__main__":
    main()
