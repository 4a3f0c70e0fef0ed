"""The list of contenders: a key, what it is, how many ranks and threads it gets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from benchmarks.peers.base import Trainer
from benchmarks.peers.tuned_settings import PACKAGES, Settings, settings_of


@dataclass(frozen=True)
class Contender:
    """One way to train. `bytes_per_parameter` is a rough peak of one rank, used to decide what may live
    in memory at the same time, never reported."""

    key: str
    title: str
    family: str
    options: dict[str, Any]
    ranks: int
    threads: int
    bytes_per_parameter: float


def _pair(stage: int) -> tuple[Contender, Contender]:
    options: dict[str, int | bool | str] = {"stage": stage}
    sharded = {0: 24.0, 1: 17.0, 2: 17.0, 3: 17.0}[stage]
    return (
        Contender(f"stage{stage}", f"zero_ext stage {stage}", "zero_ext", options, 2, 1, sharded),
        Contender(f"stage{stage}@1", f"zero_ext stage {stage}, 1 rank", "zero_ext", options, 1, 2, 24.0),
    )


def _through_gloo(stage: int) -> Contender:
    """The same as ``stage``, with bulk data through the sockets that the peers use."""
    options: dict[str, int | bool | str] = {"stage": stage, "transport": "gloo"}
    return Contender(f"stage{stage}-gloo", f"zero_ext stage {stage}, gloo", "zero_ext", options, 2, 1, 17.0)


def _offloaded(tier: str) -> tuple[Contender, Contender]:
    """Optimizer state in ``tier``, gradients in host memory, parameters on the device."""
    ours: dict[str, int | bool | str] = {"stage": 3, "optimizer": tier, "grads": "host"}
    theirs: dict[str, int | bool | str] = {"stage": 3, "optimizer": tier}
    label = {"host": "host", "nvme": "NVMe"}[tier]
    return (
        Contender(f"stage3-{tier}", f"zero_ext 3, optimizer on {label}", "zero_ext", ours, 2, 1, 17.0),
        Contender(
            f"deepspeed3-{tier}", f"DeepSpeed 3, optimizer on {label}", "deepspeed", theirs, 2, 1, 19.0
        ),
    )


def _with_muon() -> tuple[Contender, ...]:
    """Muon for hidden matrices, AdamW for the rest."""
    muon: dict[str, int | bool | str] = {"rule": "muon"}
    ours = (
        Contender(
            f"stage{stage}-muon", f"zero_ext {stage}, Muon", "zero_ext", {"stage": stage, **muon}, 2, 1, 17.0
        )
        for stage in (1, 2, 3)
    )
    theirs = (
        Contender(
            f"deepspeed{stage}-muon",
            f"DeepSpeed {stage}, Muon",
            "deepspeed",
            {"stage": stage, **muon},
            2,
            1,
            24.0,
        )
        for stage in (1, 2)
    )
    gathered = Contender(
        "fsdp2-muon", "FSDP2, gathered Muon", "fsdp2", {"reshard_after_forward": True, **muon}, 2, 1, 19.0
    )
    return *ours, *theirs, gathered


def _stored(ranks: int) -> tuple[Contender, ...]:
    """Parameters and optimizer state on NVMe; tiled: large embeddings and output layers in tiles."""
    ours: dict[str, int | bool | str] = {"stage": 3, "optimizer": "nvme", "grads": "host", "params": "nvme"}
    theirs: dict[str, int | bool | str] = {"stage": 3, "optimizer": "nvme", "params": "nvme"}
    what, label = "params and optimizer on NVMe", "" if ranks > 1 else ", 1 rank"
    key, threads = "" if ranks > 1 else "@1", 2 // ranks
    return (
        Contender(f"stage3-stored{key}", f"zero_ext 3, {what}{label}", "zero_ext", ours, ranks, threads, 8.0),
        Contender(
            f"stage3-tiled{key}",
            f"zero_ext 3, {what}, tiled{label}",
            "zero_ext",
            {**ours, "tiles": 16},
            ranks,
            threads,
            8.0,
        ),
        Contender(
            f"deepspeed3-stored{key}",
            f"DeepSpeed 3, {what}{label}",
            "deepspeed",
            theirs,
            ranks,
            threads,
            19.0,
        ),
    )


CONTENDERS = {
    contender.key: contender
    for contender in (
        Contender("plain@1", "plain loop, fp32 masters", "plain", {}, 1, 2, 24.0),
        Contender("frugal@1", "PyTorch alone, frugal", "frugal", {}, 1, 2, 20.0),
        Contender(
            "checkpointed@1",
            "PyTorch alone, checkpointed blocks",
            "frugal",
            {"checkpointed": True},
            1,
            2,
            20.0,
        ),
        Contender("compute", "forward and backward alone", "compute", {}, 2, 1, 8.0),
        Contender("ddp", "DDP, fp32 masters", "ddp", {}, 2, 1, 24.0),
        Contender("fsdp2-keep", "FSDP2, no reshard", "fsdp2", {"reshard_after_forward": False}, 2, 1, 17.0),
        Contender("fsdp2", "FSDP2, reshard", "fsdp2", {"reshard_after_forward": True}, 2, 1, 17.0),
        *(
            Contender(f"deepspeed{stage}", f"DeepSpeed {stage}", "deepspeed", {"stage": stage}, 2, 1, 19.0)
            for stage in (1, 2, 3)
        ),
        *(contender for stage in (0, 1, 2, 3) for contender in _pair(stage)),
        *(_through_gloo(stage) for stage in (1, 2, 3)),
        *(
            Contender(
                f"trainer{stage}", f"Trainer, stage {stage}", "hugging_face", {"stage": stage}, 2, 1, 17.0
            )
            for stage in (2, 3)
        ),
        *(
            Contender(
                f"trainer-deepspeed{stage}",
                f"Trainer, DeepSpeed {stage}",
                "trainer_deepspeed",
                {"stage": stage},
                2,
                1,
                19.0,
            )
            for stage in (2, 3)
        ),
        *(
            Contender(
                f"accelerate{stage}", f"Accelerate, stage {stage}", "accelerate", {"stage": stage}, 2, 1, 17.0
            )
            for stage in (2, 3)
        ),
        *_with_muon(),
        *(contender for tiers in ("host", "nvme") for contender in _offloaded(tiers)),
        *(contender for ranks in (1, 2) for contender in _stored(ranks)),
        Contender(
            "consumed@1",
            "zero_ext 3, all on NVMe, gradients used up in backward",
            "zero_ext",
            {"stage": 3, "optimizer": "nvme", "params": "nvme", "tiles": 16, "frugal": True},
            1,
            2,
            2.0,
        ),
        Contender(
            "long@1",
            "zero_ext, loss and MLP in chunks, checkpoints on NVMe",
            "zero_ext",
            {"stage": 3, "frugal": True, "long": True},
            1,
            2,
            20.0,
        ),
        Contender(
            "huge@1",
            "zero_ext 3, all on NVMe, 8-bit moments",
            "zero_ext",
            {"stage": 3, "optimizer": "nvme", "params": "nvme", "frugal": True, "moments": "8bit"},
            1,
            2,
            2.0,
        ),
    )
}


def contender_named(key: str, model: str | None = None) -> Contender:
    """The contender with this key, a peer with the settings that a sweep found best for the model.

    A peer without them, as without a model, has its defaults, and its title says so. ValueError listing the
    known keys for any other key.
    """
    if key not in CONTENDERS:
        raise ValueError(f"unknown contender {key!r}; known: {', '.join(CONTENDERS)}")
    contender = CONTENDERS[key]
    if contender.family not in PACKAGES:
        return contender
    settings = settings_of(key, contender.family, model)
    if settings is None:
        return replace(contender, title=f"{contender.title} (defaults)")
    return with_settings(contender, settings)


def with_settings(contender: Contender, settings: Settings) -> Contender:
    """The same peer with settings other than its defaults, by the names of `benchmarks.peers.knobs`."""
    return replace(contender, options={**contender.options, "settings": settings})


def titles_of(subject: str, peer: str, model: str) -> str:
    """Both sides of a comparison on a model, for the first column of a table."""
    return " / ".join(contender_named(key, model).title for key in (subject, peer))


# A peer's library is imported only in the ranks that run that peer.
TRAINERS = {
    "plain": ("benchmarks.peers.plain", "PlainTrainer"),
    "frugal": ("benchmarks.peers.plain", "FrugalTrainer"),
    "compute": ("benchmarks.peers.plain", "ComputeTrainer"),
    "ddp": ("benchmarks.peers.ddp", "DDPTrainer"),
    "fsdp2": ("benchmarks.peers.fsdp2", "FSDP2Trainer"),
    "deepspeed": ("benchmarks.peers.deepspeed_zero", "DeepSpeedTrainer"),
    "accelerate": ("benchmarks.peers.accelerate_loop", "AccelerateTrainer"),
    "hugging_face": ("benchmarks.peers.hugging_face", "HuggingFaceTrainer"),
    "trainer_deepspeed": ("benchmarks.peers.hugging_face", "DeepSpeedHuggingFaceTrainer"),
    "zero_ext": ("benchmarks.peers.zero_ext_engine", "ZeroExtTrainer"),
}


def trainer_class(family: str) -> Callable[..., Trainer]:
    """Import the trainer of this family; ValueError for an unknown one."""
    if family not in TRAINERS:
        raise ValueError(f"unknown family of contenders {family!r}; known: {', '.join(TRAINERS)}")
    module, name = TRAINERS[family]
    return getattr(import_module(module), name)
