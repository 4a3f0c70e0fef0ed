"""Model shapes with random weights, and the token batches every contender trains on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

SEQUENCE_LENGTH = 128
BATCH_SIZE = 1
DISTINCT_BATCHES = 4
WEIGHT_SEED = 20_240_901
DATA_SEED = 7_001


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of one untied Llama: widths in elements, `feed_forward` of the gated MLP."""

    name: str
    hidden: int
    layers: int
    feed_forward: int
    vocabulary: int
    heads: int

    @property
    def parameters(self) -> int:
        """Number of parameters, in elements (embedding and output matrix are separate)."""
        attention = 4 * self.hidden * self.hidden
        mlp = 3 * self.hidden * self.feed_forward
        norms = 2 * self.hidden
        return self.layers * (attention + mlp + norms) + 2 * self.vocabulary * self.hidden + self.hidden

    def configuration(self) -> Any:
        """transformers' configuration of this shape."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )


@dataclass(frozen=True)
class BloomShape:
    """Sizes of one BLOOM: its embedding, by far the largest parameter, is tied to the output."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    heads: int

    @property
    def parameters(self) -> int:
        """Number of parameters, in elements; the tied embedding counts once."""
        block = 12 * self.hidden * self.hidden + 13 * self.hidden
        return self.layers * block + self.vocabulary * self.hidden + 4 * self.hidden

    def configuration(self) -> Any:
        """transformers' configuration of this shape."""
        from transformers import BloomConfig

        return BloomConfig(
            hidden_size=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            vocab_size=self.vocabulary,
            use_cache=False,
        )


@dataclass(frozen=True)
class MixtralShape:
    """Sizes of one untied Mixtral: `feed_forward` of each of the `experts` in a block, two per token."""

    name: str
    hidden: int
    layers: int
    feed_forward: int
    experts: int
    vocabulary: int
    heads: int

    @property
    def parameters(self) -> int:
        """Number of parameters, in elements (embedding and output matrix are separate)."""
        experts = self.experts * (3 * self.hidden * self.feed_forward + self.hidden)
        block = 4 * self.hidden * self.hidden + experts + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    def configuration(self) -> Any:
        """transformers' configuration of this shape."""
        from transformers import MixtralConfig

        return MixtralConfig(
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            num_local_experts=self.experts,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            use_cache=False,
        )


Shape = LlamaShape | BloomShape | MixtralShape


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        LlamaShape("tiny", hidden=128, layers=2, feed_forward=256, vocabulary=512, heads=4),
        LlamaShape("34m", hidden=512, layers=8, feed_forward=1408, vocabulary=8192, heads=8),
        LlamaShape("239m", hidden=1024, layers=16, feed_forward=2816, vocabulary=16384, heads=16),
        LlamaShape("1b", hidden=2048, layers=22, feed_forward=5632, vocabulary=32000, heads=32),
        LlamaShape("7b", hidden=4096, layers=32, feed_forward=11008, vocabulary=32000, heads=32),
        BloomShape("bloom-tiny", hidden=64, layers=2, vocabulary=2048, heads=4),
        BloomShape("bloom-560m", hidden=1024, layers=24, vocabulary=250_880, heads=16),
        MixtralShape(
            "mixtral-tiny", hidden=64, layers=2, feed_forward=64, experts=4, vocabulary=512, heads=4
        ),
        MixtralShape(
            "mixtral-119m", hidden=512, layers=6, feed_forward=1408, experts=8, vocabulary=8192, heads=8
        ),
    )
}


def shape_named(name: str) -> Shape:
    """The shape called `name`, or the Llama of a width and a depth: "llama-512x8".

    ValueError with the known names otherwise.
    """
    sizes = re.fullmatch(r"llama-(\d+)x(\d+)", name)
    if sizes is not None:
        return llama_of(int(sizes[1]), int(sizes[2]))
    if name not in SHAPES:
        raise ValueError(f"unknown model shape {name!r}; known: {', '.join(SHAPES)}, llama-WIDTHxDEPTH")
    return SHAPES[name]


def llama_of(hidden: int, layers: int) -> LlamaShape:
    """A Llama of any depth with the proportions of the named ones; `hidden` is a multiple of 64."""
    return LlamaShape(
        f"llama-{hidden}x{layers}",
        hidden,
        layers,
        feed_forward=hidden * 11 // 4,
        vocabulary=16 * hidden,
        heads=hidden // 64,
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Floating tensors created inside are `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_model(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model whose parameters are born in `dtype`; the same seed, so the same weights, on every rank.

    Born in bfloat16 rather than cast: contenders that keep float32 parameters widen these exact values, and
    the rotary buffers stay float32 for all.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(WEIGHT_SEED)
    with default_dtype(dtype):
        model = AutoModelForCausalLM.from_config(shape.configuration())
    return model.train()


def batch_for(shape: Shape, rank: int, step: int, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    """Token ids of one rank's step, int64 [BATCH_SIZE, length].

    A few fixed batches are repeated, so the loss falls and contenders that do not learn alike are seen.
    """
    generator = torch.Generator().manual_seed(DATA_SEED + 1_000 * rank + step % DISTINCT_BATCHES)
    return torch.randint(shape.vocabulary, (BATCH_SIZE, length), generator=generator)
