"""The model, its optimizer and schedule, held-out loss and sampling, in ordinary PyTorch without ZeRO."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from demo.settings import ModelShape, Settings

BYTES = 256


def build_model(shape: ModelShape, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a byte-level Llama with random weights of `dtype`, the same on every rank and in every run."""
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.feed_forward_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=4 * shape.window,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # an fp32 model to convert would be twice as large
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def build_optimizer(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """Return AdamW with the usual hyperparameters for language models."""
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def build_schedule(optimizer: torch.optim.Optimizer, settings: Settings) -> LambdaLR:
    """Return a linear warm-up followed by a cosine decay to a tenth of the learning rate."""

    def factor(step: int) -> float:
        done = min(step / settings.steps, 1.0)
        return min((step + 1) / settings.warmup_steps, 0.55 + 0.45 * math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss over `windows` [count, length] in nats per byte.

    All ranks must call this function, because stage 3 gathers parameters in the forward pass.
    """
    model.eval()
    losses = [model(input_ids=share, labels=share).loss.double() for share in windows.split(16)]
    model.train()
    return float(torch.stack(losses).mean())


@torch.no_grad()
def sample_text(
    model: LlamaForCausalLM, settings: Settings, prompt: str = "Return a new ", length: int = 240
) -> str:
    """Continue `prompt` with `length` bytes sampled from the model. Unprintable characters become `?`."""
    torch.manual_seed(settings.seed)
    model.eval()
    seen = torch.tensor([list(prompt.encode())])
    cache, drawn = None, seen
    for _ in range(length):
        out = model(input_ids=drawn, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        drawn = torch.multinomial((out.logits[:, -1].float() / 0.8).softmax(-1), 1)
        seen = torch.cat([seen, drawn], dim=1)
    model.train()
    text = bytes(seen[0].tolist()).decode(errors="replace").replace("\0", "\n").replace("\ufffd", "?")
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
