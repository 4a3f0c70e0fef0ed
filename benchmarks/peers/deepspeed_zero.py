"""DeepSpeed ZeRO 1, 2 and 3 on its CPU accelerator, with its own fused CPU Adam."""

import deepspeed
import torch

from benchmarks.harness.shapes import LlamaShape, build_model
from benchmarks.peers.base import BETAS, CLIP_NORM, EPSILON, LEARNING_RATE, WEIGHT_DECAY, loss_of, nvme_folder

NEVER = 1_000_000_000


def zero_section(stage: int, optimizer: str) -> dict:
    """The ZeRO part of the JSON: ``optimizer`` is the tier of the optimizer's state."""
    if optimizer == "device":
        return {"stage": stage}
    if optimizer == "host":
        return {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    return {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": nvme_folder()}}


def configuration(stage: int, optimizer: str = "device") -> dict:
    """The JSON a DeepSpeed user would write; everything unsaid keeps DeepSpeed's default."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": NEVER,
        "bf16": {"enabled": True},
        "zero_optimization": zero_section(stage, optimizer),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPSILON,
                "weight_decay": WEIGHT_DECAY,
            },
        },
    }


class DeepSpeedTrainer:
    """`deepspeed.initialize`, then its loop: engine(batch), engine.backward, engine.step."""

    def __init__(self, shape: LlamaShape, stage: int, optimizer: str = "device") -> None:
        model = build_model(shape)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(model=model, config=configuration(stage, optimizer))
        # The engine casts float buffers to bfloat16; the rotary ones go back to what the others compute with.
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.engine, tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def gradient_norm(self) -> float:
        return float(self.engine.get_global_grad_norm())
