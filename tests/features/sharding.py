"""What a rank trains and loads in each test of a feature of ZeRO itself, on any device."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.step.one_bit import training as compressed
from tests.zero.test_accelerator import Scale, tiny_model
from tests.zero.training import Plan, adamw, configuration, sgd, train_prepared
from tests.zero.unshard.stacked_mixtures import ROUTED, MixtureModel, batch_of
from zero_ext.optim.full_tensors import muon_stepper
from zero_ext.zero import engine_of

Found = dict[str, Any]  # what must be the same on every device


def lion(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lion(parameters, lr=1e-3, weight_decay=0.1)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Lamb(parameters, lr=1e-3, weight_decay=0.1)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return zero_ext.Muon(parameters, lr=1e-3)


OPTIMIZERS = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "lamb": lamb,
    "muon": muon,
    "adafactor": torch.optim.Adafactor,
}


def on_host(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def with_storage(offload: dict[str, Any], folder: str) -> dict[str, Any]:
    paths = {"nvme_paths": [folder]} if "nvme" in offload.values() else {}
    return {"staging_buffer_bytes": 1 << 20, **paths, **offload}


def zero(
    world: World, device: str, stage: int, plan: dict[str, Any], offload: dict[str, Any], **more: Any
) -> Found:
    """Steps of a small language model; ``optimizer`` names one of OPTIMIZERS."""
    torch.manual_seed(world.seed)
    make = OPTIMIZERS[more.pop("optimizer", "adamw")]
    course = Plan(**{"steps": 2, **plan})
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(
            stage, course, offload=with_storage(offload, folder), units={"bucket_elements": 700}, **more
        )

        def batch(*indices: int) -> torch.Tensor:
            return language_batch(*indices).to(device)

        # A device multiplies matrices in batches, which rounds otherwise than the CPU's one by one.
        with mock.patch.object(muon_stepper, "BATCH_ELEMENTS", 1):
            run = train_prepared(world, tiny_model(device), language_loss, batch, config, course, make)
    return {"losses": run.losses, "norms": run.norms, **on_host(run.parameters)}


class ScaledModel(TinyModel):
    """The tiny model with norms that every device computes in the same order."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied=tied)
        for module in (self, *self.blocks):
            module.norm = Scale(self.norm.weight.numel())


def steps(world: World, device: str, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = language_loss(model, language_batch(world.seed, step, 0, world.rank).to(device))
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded_init(world: World, device: str, offload: dict[str, Any], loads: bool) -> Found:
    """``zero_ext.Init``, with values of its own or streamed from files of safetensors, then steps."""
    torch.manual_seed(world.seed)
    folder = world.shared_folder()
    with tempfile.TemporaryDirectory() as storage:
        config = configuration(3, offload=with_storage(offload, storage), gradient_clipping=0.5)
        if loads and world.rank == 0:
            save_file(
                {name: value + 0.1 for name, value in ScaledModel().state_dict().items()},
                f"{folder}/model.safetensors",
            )
        world.barrier()
        if loads:
            with torch.device("meta"):
                model: nn.Module = ScaledModel()
        else:
            with zero_ext.Init(config=config):
                model = ScaledModel(tied=True)
        prepared, optimizer = zero_ext.prepare(
            model, adamw(model.parameters()), config, device=device, init="skip" if loads else "broadcast"
        )
        if loads:
            zero_ext.load_weights(prepared, folder)
        losses = steps(world, device, prepared, optimizer, 0, 2)
        return {"losses": losses, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}


def checkpoints(world: World, device: str, stages: list[int], offload: dict[str, Any]) -> Found:
    """Steps, a checkpoint, and further steps of another model that loads it in another stage."""
    folder = world.shared_folder()
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as storage:
        for number, stage in enumerate(stages):
            torch.manual_seed(world.seed + number)
            model = ScaledModel(tied=True).to(device)
            tiers = with_storage({kind: offload[kind] for kind in list(offload)[:stage]}, storage)
            config = configuration(stage, offload=tiers, gradient_clipping=0.5)
            prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config)
            if number:
                zero_ext.load_checkpoint(folder, prepared)
            losses += steps(world, device, prepared, optimizer, 2 * number, 2 * number + 2)
            zero_ext.save_checkpoint(folder, prepared).wait()
        return {"losses": losses, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}


def compressed_optimizer(world: World, device: str, course: str) -> Found:
    """Steps of the one-bit family: warm-up, then signs."""
    chosen = compressed.COURSES[course]
    model, optimizer, _ = compressed.prepared(world, chosen, world.seed, device=device)
    losses = compressed.train(world, chosen, world.seed, model, optimizer, range(chosen.steps))
    return {"losses": losses, **on_host(compressed.parameters(model))}


def editing(world: World, device: str) -> Found:
    """Reads and writes of sharded parameters, torch's and the engine's own clipping, local steps."""
    torch.manual_seed(world.seed)
    model = ScaledModel(tied=True).to(device)
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), configuration(3))
    with zero_ext.gathered(prepared.norm.parameters(), modifier_rank=0), torch.no_grad():
        prepared.norm.weight.add_(1.0 + world.rank)
    norms = []
    for step in range(3):
        with prepared.no_sync():
            language_loss(prepared, language_batch(world.seed, step, 1, world.rank).to(device)).backward()
        language_loss(prepared, language_batch(world.seed, step, 0, world.rank).to(device)).backward()
        clip = (prepared.clip_grad_norm_, lambda most: nn.utils.clip_grad_norm_(prepared.parameters(), most))
        norms.append(float(clip[step % 2](0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}


def routed_experts(
    world: World, device: str, offload: dict[str, Any], checkpoints: bool, updates: str
) -> Found:
    """Steps of mixtures that gather only the experts that tokens reach, other ones in every micro-batch."""
    units = {**ROUTED, "update_experts": updates}
    model, losses = MixtureModel(world.seed, checkpoints).to(device), []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(3, Plan(micro_batches=2), offload=with_storage(offload, folder), units=units)
        prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config)
        for step in range(4):
            for micro in range(2):
                batch = batch_of(world.seed + step, [[step], [micro, 3 + step]]).to(device)
                loss = batch.loss_on(prepared, world.rank)
                prepared.backward(loss)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, **on_host(zero_ext.full_state_dict(prepared, rank0_only=False))}


def inference(world: World, device: str, offload: dict[str, Any]) -> Found:
    """Forward without an optimizer, parameters in their tier."""
    torch.manual_seed(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = {"stage": 3, "offload": with_storage(offload, folder)}
        prepared, _ = zero_ext.prepare(ScaledModel().to(device), None, config)
        assert engine_of(prepared).world_size == world.size
        with torch.no_grad():
            logits = [prepared(language_batch(world.seed, step, 0, 0).to(device)) for step in range(2)]
        return {"logits": torch.stack(logits).cpu()}
