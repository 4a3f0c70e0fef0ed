"""A DeepSpeed script with a pipeline of two stages: ``pipeline.py OUT_FOLDER``. It knows nothing of
zero_ext."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WORDS, WIDTH = 61, 32
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.005, "warmup_num_steps": 3}},
}


class Block(nn.Module):
    """Takes a tuple, and returns one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        hidden, mask = inputs
        return hidden + torch.tanh(self.inner(self.norm(hidden))) * mask, mask


class Words(nn.Embedding):
    def __init__(self):
        torch.manual_seed(5)
        super().__init__(WORDS, WIDTH)

    def forward(self, inputs):
        words, mask = inputs
        return super().forward(words), mask


def head(words, inputs):
    return inputs[0] @ words.weight.T


def loss_fn(scores, labels):
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def batches(seed):
    while True:
        generator = torch.Generator().manual_seed(seed)
        words, labels = torch.randint(0, WORDS, (2, 4, 12), generator=generator)
        yield (words, torch.randint(0, 2, (4, 12, 1), generator=generator)), labels
        seed += 1


def engine_of(method, interval):
    layers = [TiedLayerSpec("words", Words), *(LayerSpec(Block, seed) for seed in range(4))]
    layers.append(TiedLayerSpec("words", Words, forward_fn=head))
    module = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=loss_fn,
        partition_method=method,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint,
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3, weight_decay=0.1, eps=1e-3)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(CONFIG))
    return engine


def run(folder, method, interval):
    engine = engine_of(method, interval)
    data = batches(1000)
    losses = [engine.train_batch(data_iter=data).item() for _ in range(4)]
    engine.save_checkpoint(str(folder))
    losses += [engine.train_batch(data_iter=batches(7)).item() for _ in range(2)]
    evaluated = engine.eval_batch(batches(3)).item()
    resumed = engine_of(method, interval)
    resumed.load_checkpoint(str(folder))
    again = [resumed.train_batch(data_iter=batches(7)).item() for _ in range(2)]
    try:
        engine.backward(torch.ones(()))
    except Exception as error:
        refused = type(error).__name__
    return {
        "losses": losses,
        "again": again,
        "evaluated": evaluated,
        "refused": refused,
        "lr": resumed.get_lr(),
        "parts": [int(bound) for bound in engine.module.parts],
        "stage": [engine.stage_id, engine.num_stages, engine.is_first_stage(), engine.is_last_stage()],
        "batch": [engine.micro_batches, engine.micro_batch_size, engine.train_batch_size()],
    }


def main():
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    found = {
        f"{method}-{interval}": run(folder / f"{method}-{interval}", method, interval)
        for method, interval in (("parameters", 0), ("type:block", 2))
    }
    found["file"] = deepspeed.__file__
    if deepspeed.comm.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
