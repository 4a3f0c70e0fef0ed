"""A small pipeline by DeepSpeed's names, and the same model in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.multi.rank import World
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed.pipeline_engine import PipelineEngine
from zero_ext.integrations.deepspeed.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, WORDS, LENGTH, BLOCKS, SAMPLES, MICRO_BATCHES = 8, 16, 5, 4, 2, 3
RATE = 1e-2
MicroBatch = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Words(nn.Module):
    """An embedding with a bias; takes words and a mask as one value, and passes both on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH, device="cpu"))
        self.bias = nn.Parameter(torch.randn(WIDTH, device="cpu"))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        words, mask = inputs
        return self.weight[words] + self.bias, mask


class Block(nn.Module):
    """Leaves out what the mask says; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = inputs
        self.calls += torch.is_grad_enabled()
        return hidden + torch.tanh(self.inner(hidden)) * mask[..., None], mask


def scores(words: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """By the weight and bias that embed words too."""
    return (inputs[0] - words.bias) @ words.weight.T


def loss_fn(found: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of each word, weighted."""
    wanted, weights = labels
    each = nn.functional.cross_entropy(found.flatten(0, 1).float(), wanted.flatten(), reduction="none")
    return (each * weights.flatten()).mean()


def layers() -> list[Any]:
    first = TiedLayerSpec("words", Words)
    last = TiedLayerSpec("words", Words, forward_fn=scores, tied_weight_attr=["weight", "bias"])
    return [first, *(LayerSpec(Block) for _ in range(BLOCKS)), last]


class Plain(nn.Module):
    """The model of :func:`layers` in one process, with the values of a pipeline's ``layers.<n>.<name>``."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Words(), *(Block() for _ in range(BLOCKS))])
        self.load_state_dict(values)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value = inputs
        for layer in self.layers:
            value = layer(value)
        return scores(self.layers[0], value)


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "eps": 1e-3, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": RATE / 4, "warmup_max_lr": RATE, "warmup_num_steps": 4},
        },
        "zero_optimization": {"stage": stage},
        **more,
    }


def engine_of(stage: int, num_stages: int = 2, **options: Any) -> PipelineEngine:
    """An engine over all ranks; ``config`` and ``training_data`` among ``options`` go to ``initialize``."""
    config = {**config_of(stage), **options.pop("config", {})}
    data = options.pop("training_data", None)
    module = PipelineModule(
        options.pop("layers", None) or layers(), num_stages=num_stages, loss_fn=loss_fn, **options
    )
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config, training_data=data
    )
    assert isinstance(engine, deepspeed.PipelineEngine) and engine.optimizer is optimizer
    assert (engine.training_dataloader, engine.lr_scheduler) == (loader, scheduler)
    return engine


def full_values(world: World, engine: PipelineEngine) -> dict[str, torch.Tensor]:
    """All stages' parameters; those of the tied layer under its first name."""
    found: dict[str, torch.Tensor] = {}
    for values in world.everyone(engine.module_state_dict()):
        found |= {name: each for name, each in values.items() if not name.startswith(f"layers.{BLOCKS + 1}.")}
    return found


def micro_batch(seed: int, number: int, samples: int = SAMPLES) -> MicroBatch:
    """Words and a mask, words to predict and weights, [samples, LENGTH] each."""
    generator = torch.Generator().manual_seed(seed + 1009 * number)
    words, wanted = torch.randint(WORDS, (2, samples, LENGTH), generator=generator)
    mask = (torch.rand(samples, LENGTH, generator=generator) > 0.3).float()
    return (words, mask), (wanted, torch.rand(samples, LENGTH, generator=generator))


def micro_batches(engine: PipelineEngine, seed: int, first: int = 0) -> Iterator[MicroBatch]:
    """This replica's, without end: of those of a step, replica r has the r-th part."""
    step, replicas = first, engine.dp_world_size
    while True:
        for number in range(MICRO_BATCHES):
            yield micro_batch(
                seed, number + MICRO_BATCHES * (engine.get_data_parallel_rank() + replicas * step)
            )
        step += 1


class Alone:
    """AdamW by torch in one process, on all micro-batches of a step one after another."""

    def __init__(self, values: dict[str, torch.Tensor], seed: int, replicas: int) -> None:
        self.model, self.seed, self.count, self.steps = Plain(values), seed, MICRO_BATCHES * replicas, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, eps=1e-3, weight_decay=0.0)

    def mean_loss(self, step: int) -> torch.Tensor:
        numbers = range(self.count * step, self.count * (step + 1))
        pairs = (micro_batch(self.seed, number) for number in numbers)
        return torch.stack([loss_fn(self.model(inputs), labels) for inputs, labels in pairs]).mean()

    def step(self, rate: float) -> float:
        loss = self.mean_loss(self.steps)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(loss.detach())
