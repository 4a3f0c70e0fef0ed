"""A Llama as a list of layers, for pipelines."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.shapes import LlamaShape, build_model


class Decoder(nn.Module):
    """A layer of transformers' Llama that makes its positions itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [batch, tokens, width] to the same."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions))


def llama_layers(shape: LlamaShape) -> list[nn.Module]:
    """The model of `build_model`, cut into embedding, decoder layers, norm and output."""
    model: Any = build_model(shape)
    inner = model.model
    decoders = [Decoder(layer, inner.rotary_emb) for layer in inner.layers]
    return [inner.embed_tokens, *decoders, inner.norm, model.lm_head]


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of every token given those before; logits [batch, tokens, vocabulary], tokens int64
    [batch, tokens]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
