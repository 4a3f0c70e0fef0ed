"""Transformers by their sizes: units in the order of their calls, with parameters, FLOPs and activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.plan.memory import check_count
from zero_ext.zero.partition import owned_parameters, plan_units


@dataclass(frozen=True)
class UnitCost:
    """One unit. Activations are bytes a token.

    Attributes:
        name: for spans.
        parameters: elements of the flat buffer.
        forward_flops: of a token.
        activations: what autograd keeps of the unit's own computing.
        output: what it hands on; all that is kept where activations are recomputed.
        share: of its block: one over the number of tiles.
        recomputes: its forward runs again in backward where activations are recomputed.
    """

    name: str
    parameters: int
    forward_flops: float
    activations: float = 0.0
    output: float = 0.0
    share: float = 1.0
    recomputes: bool = True


@dataclass(frozen=True)
class ModelCost:
    """Units in the order of a forward; ``sequence`` tokens make a sample."""

    name: str
    units: tuple[UnitCost, ...]
    sequence: int

    @property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(unit.parameters for unit in self.units)


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder in 16-bit precision.

    A layer has 4h² parameters of attention and 2hf of its feed-forward part (3hf where ``gated``), f = 4h by
    default. A token's forward takes 2 FLOPs a parameter of matrices and 4hs of attention (Narayanan et al.
    2021, arXiv 2104.04473, section 5.1). A layer's activations are h(34 + 5as/h) bytes a token (Korthikanti
    et al. 2022, arXiv 2205.05198, equation 2); the second term, the attention matrix, is not kept where
    ``fused_attention``. ``tied``: the output matrix is the embedding.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    feed_forward: int = 0
    gated: bool = False
    tied: bool = True
    fused_attention: bool = False
    tiles: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "vocabulary", "sequence", "tiles"):
            check_count(name, getattr(self, name), 1)
        check_count("feed_forward", self.feed_forward, 0)

    def cost(self) -> ModelCost:
        """Embedding, layers (each cut into ``tiles`` units), output matrix."""
        hidden, length = self.hidden, self.sequence
        matrices = (3 if self.gated else 2) * hidden * (self.feed_forward or 4 * hidden) + 4 * hidden * hidden
        vectors = 2 * hidden if self.gated else 13 * hidden
        kept = 34 * hidden + (0 if self.fused_attention else 5 * self.heads * length)
        table = self.vocabulary * hidden
        units = [UnitCost("embedding", table, 0.0, output=2 * hidden, recomputes=False)]
        for number in range(self.layers * self.tiles):
            layer, tile = divmod(number, self.tiles)
            units.append(
                UnitCost(
                    name=f"layer {layer}" if self.tiles == 1 else f"layer {layer}, tile {tile}",
                    parameters=-(-(matrices + vectors) // self.tiles),
                    forward_flops=(2 * matrices + 4 * hidden * length) / self.tiles,
                    activations=kept / self.tiles,
                    output=2 * hidden / self.tiles,
                    share=1 / self.tiles,
                )
            )
        # Logits in 16 bits, their softmax in 32.
        head = (0 if self.tied else table) + hidden
        logits = 6 * self.vocabulary
        units.append(UnitCost("output", head, 2.0 * table, activations=logits, recomputes=False))
        return ModelCost(self.name, tuple(units), length)


def model_cost(model: nn.Module, config: ZeroConfig, world_size: int, sequence: int) -> ModelCost:
    """The units that ``zero_ext.prepare`` makes of ``model``, in the order of registration.

    A token's forward takes 2 FLOPs a parameter of every matrix but embeddings; what attention computes beside
    its matrices, and activations, are not known and count nothing. The model may lie on the meta device.
    """
    check_count("sequence", sequence, 1)
    settings = config.replace(batch=config.batch.resolve(world_size))
    owned = owned_parameters(model, settings.precision.dtype)
    looked_up = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    units = []
    for plan in plan_units(model, owned, settings, world_size):
        parameters: Sequence[torch.Tensor] = [item.parameter for item in plan.members]
        computed = sum(p.numel() for p in parameters if p.dim() >= 2 and p not in looked_up)
        units.append(UnitCost(plan.name, sum(p.numel() for p in parameters), 2.0 * computed))
    return ModelCost(type(model).__name__, tuple(units), sequence)


def _gpt(
    name: str, layers: int, hidden: int, heads: int, sequence: int = 1024, tiles: int = 1
) -> Transformer:
    return Transformer(name, hidden, layers, heads, vocabulary=51200, sequence=sequence, tiles=tiles)


def _llama(name: str, layers: int, hidden: int, heads: int, feed_forward: int, sequence: int) -> Transformer:
    return Transformer(
        name,
        hidden,
        layers,
        heads,
        32000,
        sequence,
        feed_forward,
        gated=True,
        tied=False,
        fused_attention=True,
    )


TRANSFORMERS = {
    shape.name: shape
    for shape in (
        _gpt("gpt-1.2b", 40, 1536, 16),
        _gpt("gpt-10b", 50, 4096, 32),
        _gpt("gpt-175b", 96, 12288, 96, tiles=2),
        _gpt("gpt-530b", 105, 20480, 128, tiles=4),
        _gpt("gpt-1t", 128, 25600, 160, tiles=8),
        _gpt("gpt-2t", 160, 32768, 128, tiles=8),
        _llama("llama-7b", 32, 4096, 32, 11008, 2048),
        _llama("llama-13b", 40, 5120, 40, 13824, 2048),
        _llama("llama-65b", 80, 8192, 64, 22016, 2048),
    )
}


def transformer_named(name: str) -> Transformer:
    """A shape of :data:`TRANSFORMERS`; ValueError with the known names otherwise."""
    if name not in TRANSFORMERS:
        raise ValueError(f"model: {name!r} given, one of {', '.join(TRANSFORMERS)} wanted")
    return TRANSFORMERS[name]
