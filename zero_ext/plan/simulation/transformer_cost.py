"""Transformers by their sizes: units in the order of their calls, with parameters, FLOPs and activations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zero_ext.plan.simulation.mixture import Mixture
from zero_ext.plan.state_memory import check_count


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit. Activations are bytes per token.

    Attributes:
        name: for spans.
        parameters: elements of the flat buffer.
        forward_flops: of a token.
        activations: what autograd keeps of the unit's own computing.
        output: what it hands on; all that is kept where activations are recomputed.
        share: of its block: one over the number of tiles.
        recomputes: its forward runs again in backward where activations are recomputed.
        tied: modules at both ends of the model use it.
        looked_up: rows of it are taken and nothing else, so that backward does not read it.
        spread: ranks that each have other parameters here. ZeRO shards them over ranks with the same ones.
        exchanged: that an all-to-all before and behind it moves, those that stay on the rank included.
    """

    name: str
    parameters: int
    forward_flops: float
    activations: float = 0.0
    output: float = 0.0
    share: float = 1.0
    recomputes: bool = True
    tied: bool = False
    looked_up: bool = False
    spread: int = 1
    exchanged: float = 0.0


@dataclass(frozen=True)
class TensorGroup:
    """A module's parameters in elements, in the order of registration: each of ``matrices`` with its part of
    ``vectors``.

    Attributes:
        block: it is an entry of a stack, gathered as one in stage 3.
        tiles: units of their own that each matrix is cut into in stage 3; 1 for none.
        tied: modules at both ends of the model use it.
        looked_up: rows of it are taken and nothing else, so that backward does not read it.
        side: rows or columns of every matrix; 0: unknown.
        vectors_first: a norm comes before the matrices.
        experts: elements of the stacks of experts, those of one of ``spread`` ranks.
        spread: ranks that each have other experts.
    """

    matrices: tuple[int, ...]
    vectors: int = 0
    block: bool = False
    tiles: int = 1
    tied: bool = False
    looked_up: bool = False
    side: int = 0
    vectors_first: bool = False
    experts: tuple[int, ...] = ()
    spread: int = 1

    @property
    def elements(self) -> int:
        """Of all of them."""
        return sum(self.matrices) + self.vectors + sum(self.experts)


@dataclass(frozen=True)
class ModelCost:
    """The units of a model in the order of a forward.

    Attributes:
        name: for tables.
        units: in the order of a forward.
        sequence: tokens of a sample.
        groups: the modules that hold the parameters; by default each unit is one, of one tensor.
        derived: caches what planning worked out of them, by what that depends on.
    """

    name: str
    units: tuple[UnitCost, ...]
    sequence: int
    groups: tuple[TensorGroup, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def tensor_groups(self) -> tuple[TensorGroup, ...]:
        """`groups`, or one group per unit."""
        return self.groups or tuple(
            TensorGroup((unit.parameters,), block=unit.recomputes) for unit in self.units
        )

    @cached_property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(unit.parameters for unit in self.units)

    @cached_property
    def spreads(self) -> tuple[int, ...]:
        """Numbers of ranks that parameters are spread over before ZeRO shards them, 1 first."""
        return tuple(sorted({1, *(group.spread for group in self.tensor_groups)}))

    @cached_property
    def has_experts(self) -> bool:
        """Return whether there is a mixture of experts."""
        return any(group.experts for group in self.tensor_groups)

    @cached_property
    def activations(self) -> float:
        """Bytes per token that autograd keeps of all units."""
        return sum(unit.activations for unit in self.units)

    @cached_property
    def outputs(self) -> float:
        """Bytes per token that all units hand on."""
        return sum(unit.output for unit in self.units)

    @cached_property
    def widest_block(self) -> float:
        """Bytes per token that autograd keeps of one block: as many tiles as make it one."""
        return max(unit.activations / unit.share for unit in self.units)


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder in 16-bit precision.

    A layer has 4h² parameters of attention and 2hf of its feed-forward part (3hf where `gated`), f = 4h by
    default. A token's forward takes 2 FLOPs per parameter of matrices and 4hs of attention (Narayanan et al.
    2021, arXiv 2104.04473, section 5.1). A layer's activations are h(34 + 5as/h) bytes per token (Korthikanti
    et al. 2022, arXiv 2205.05198, equation 2). The second term, the attention matrix, is not kept where
    `fused_attention`. In a layer with a mixture, 19 of the 34 are those of its experts instead, and FLOPs are
    those of the experts that a token passes.

    Attributes:
        name: for tables.
        hidden: h, width of a layer.
        layers: number of layers.
        heads: a, heads of queries.
        vocabulary: words.
        sequence: s, tokens of a sample.
        feed_forward: f, width of the feed-forward part; 0: 4 × hidden.
        gated: the feed-forward part has three matrices instead of two.
        tied: the output matrix is the embedding.
        fused_attention: the attention matrix is not kept for backward.
        tiles: units that each layer is cut into.
        key_value_heads: heads of keys and values; 0: as many as `heads`.
        head_size: width of a head; 0: hidden / heads.
        vectors: elements of a layer's biases and norms; 0: two norms without bias where `gated`, else all
            of both.
        before: elements of the embedding unit besides the table: positions, token types, norms.
        after: elements of a dense layer of the head besides the output matrix.
        tp_size: ranks that share every matrix and the biases behind split outputs; norms and other
            biases are full on each (Shoeybi et al., arXiv 1909.08053, section 3), and so are scores of the
            vocabulary. A layer keeps h(10 + 24/t + 5as/(ht)) bytes of activations per token (Korthikanti et
            al., equation 2). Cost is that of one of these ranks.
        attention: elements of the matrices of attention, where they are others than those of queries, keys,
            values and outputs.
        mixture: experts of the layers; None: all layers are dense.

    Raises:
        ValueError: a size is out of range.
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
    key_value_heads: int = 0
    head_size: int = 0
    vectors: int = 0
    before: int = 0
    after: int = 0
    tp_size: int = 1
    attention: tuple[int, ...] = ()
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "vocabulary", "sequence", "tiles", "tp_size"):
            check_count(name, getattr(self, name), 1)
        for name in ("feed_forward", "key_value_heads", "head_size", "vectors", "before", "after"):
            check_count(name, getattr(self, name), 0)
        if self.mixture is not None and (self.tp_size, self.tiles) != (1, 1):
            raise ValueError(
                f"tp_size, tiles: expected 1 with a mixture of experts, got {self.tp_size} and {self.tiles}. "
                "Use 'ep' to spread the experts."
            )

    @property
    def layer_matrices(self) -> tuple[int, int]:
        """Elements of a dense layer's matrices: those of attention, those of its feed-forward part."""
        heads = self.key_value_heads or self.heads
        width = self.heads * self.head_size or self.hidden
        attention = sum(self.attention) or 2 * self.hidden * (width + width * heads // self.heads)
        return attention, (3 if self.gated else 2) * self.hidden * self._feed_forward

    @property
    def largest_matrix(self) -> int:
        """Elements of a layer's largest matrix."""
        return self.hidden * max(self._feed_forward, self.heads * self.head_size or self.hidden)

    @property
    def _feed_forward(self) -> int:
        return self.feed_forward or 4 * self.hidden

    def cost(self) -> ModelCost:
        """Return the units: embedding, layers (each cut into `tiles` units), output matrix.

        Returns:
            Their costs.
        """
        hidden, length, tp = self.hidden, self.sequence, self.tp_size
        matrices = sum(self._own_matrices)
        width = self.heads * self.head_size or hidden
        scores = 0 if self.fused_attention else 5 * self.heads * length
        saved = (10 + 24 / tp) * hidden + scores / tp
        layer = [
            UnitCost(
                name="layer" if self.tiles == 1 else f"tile {tile} of a layer",
                parameters=-(-(matrices + self._own_vectors) // self.tiles),
                forward_flops=(2 * matrices + 4 * width * length / tp) / self.tiles,
                activations=saved / self.tiles,
                output=2 * hidden / self.tiles,
                share=1 / self.tiles,
            )
            for tile in range(self.tiles)
        ]
        first = UnitCost(
            "embedding",
            self._own_table + self.before,
            0.0,
            output=2 * hidden,
            recomputes=False,
            tied=self.tied,
            looked_up=not self.tied,
        )
        units = [first]
        for number in range(self.layers):
            mixture = self._mixture_of(number)
            units += layer if mixture is None else self._mixture_units(mixture)
        # Logits in 16 bits, their softmax in 32.
        head = (0 if self.tied else self._own_table) + (1 if self.gated else 2) * hidden + self.after
        logits = 6 * self.vocabulary
        flops = 2.0 * (self._own_table + self.after)
        units.append(UnitCost("output", head, flops, activations=logits, recomputes=False))
        return ModelCost(self.name, tuple(units), length, self._groups())

    def _mixture_of(self, layer: int) -> Mixture | None:
        found = self.mixture
        return None if found is None or layer in found.dense_layers else found

    def _mixture_units(self, mixture: Mixture) -> list[UnitCost]:
        """Return a layer with ``mixture``. Experts on other ranks are a unit of their own, which exchanges
        tokens."""
        hidden, heads = self.hidden, self.heads
        width = heads * self.head_size or hidden
        common = self.layer_matrices[0] + sum(mixture.replicated(hidden))
        routed, saved = sum(mixture.stacks(hidden)), mixture.routed_activations(hidden)
        scores = 0 if self.fused_attention else 5 * heads * self.sequence
        own = 15 * hidden + scores + mixture.shared_activations()
        replicated = UnitCost(
            "layer",
            common + self._own_vectors,
            2.0 * common + 4 * width * self.sequence,
            own,
            2 * hidden,
            own / (own + saved),
        )
        flops, spread = 2.0 * mixture.active(hidden), mixture.ep_size
        if spread == 1:
            return [
                replace(
                    replicated,
                    parameters=replicated.parameters + routed,
                    forward_flops=replicated.forward_flops + flops,
                    activations=own + saved,
                    share=1.0,
                )
            ]
        experts = UnitCost("experts of a layer", routed, flops, saved, share=saved / (own + saved))
        return [replicated, replace(experts, spread=spread, exchanged=mixture.exchanged(hidden))]

    @property
    def parameters(self) -> int:
        """Elements, with those of all experts."""
        found = self.mixture
        return (self if found is None else replace(self, mixture=replace(found, ep_size=1))).cost().parameters

    @property
    def active_parameters(self) -> int:
        """Elements that one token passes: all but the experts that it is not sent to."""
        found = self.mixture
        if found is None:
            return self.parameters
        idle = sum(replace(found, ep_size=1).stacks(self.hidden)) - found.active(self.hidden)
        return (
            self.parameters
            - sum(self._mixture_of(number) is not None for number in range(self.layers)) * idle
        )

    @property
    def _own_matrices(self) -> tuple[int, int]:
        """:attr:`layer_matrices` of one of ``tp_size`` ranks."""
        attention, feed_forward = self.layer_matrices
        return attention // self.tp_size, feed_forward // self.tp_size

    @property
    def _own_vectors(self) -> int:
        """Elements of a layer's biases and norms on one of ``tp_size`` ranks."""
        norms = (2 if self.gated else 6) * self.hidden  # and biases of outputs that are sums over the ranks
        vectors = self.vectors or (norms if self.gated else 9 * self.hidden + self._feed_forward)
        return min(vectors, norms) + -(-max(vectors - norms, 0) // self.tp_size)

    @property
    def _own_table(self) -> int:
        return -(-self.vocabulary // self.tp_size) * self.hidden

    @property
    def matrix_tiles(self) -> int:
        """Tiles of each matrix of a layer, so that none is larger than a `tiles`-th of the layer."""
        return math.ceil(self.largest_matrix / math.ceil(sum(self.layer_matrices) / self.tiles))

    def _groups(self) -> tuple[TensorGroup, ...]:
        hidden, table = self.hidden, self._own_table
        width = self.heads * self.head_size or hidden
        attention, feed_forward = self._own_matrices
        out = hidden * width // self.tp_size
        shared = (attention - 2 * out) // 2
        # Gated models have queries, keys and values apart, the others in one matrix.
        usual = (out, shared, shared, out) if self.gated else (attention - out, out)
        inputs = self.attention or usual
        projections = 3 if self.gated else 2
        layer = TensorGroup(
            (*inputs, *[feed_forward // projections] * projections),
            self._own_vectors,
            block=True,
            tiles=self.matrix_tiles if self.tiles > 1 else 1,
            side=hidden,
            vectors_first=not self.gated,
        )
        ends = [TensorGroup((), (1 if self.gated else 2) * hidden)]
        if not self.tied:
            ends.append(TensorGroup((table,), tiles=layer.tiles, side=hidden))
        first = [TensorGroup((table,), tied=self.tied, looked_up=not self.tied, side=hidden)]
        first += [TensorGroup((self.before,), looked_up=True, side=hidden)] if self.before else []
        ends += [TensorGroup((self.after,), side=hidden)] if self.after else []
        layers = []
        for number in range(self.layers):
            mixture = self._mixture_of(number)
            layers.append(layer if mixture is None else _with_experts(layer, inputs, mixture, hidden))
        return (*first, *layers, *ends)


def _with_experts(
    layer: TensorGroup, attention: tuple[int, ...], mixture: Mixture, hidden: int
) -> TensorGroup:
    """Return ``layer`` with experts instead of its feed-forward part."""
    return replace(
        layer,
        matrices=(*attention, *mixture.replicated(hidden)),
        experts=mixture.stacks(hidden),
        spread=mixture.ep_size,
    )


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
"""Shapes of models by name."""


def transformer_named(name: str) -> Transformer:
    """Return a shape by name.

    Args:
        name: a key of `TRANSFORMERS`.

    Returns:
        The shape.

    Raises:
        ValueError: there is no such shape; names those there are.
    """
    if name not in TRANSFORMERS:
        raise ValueError(
            f"model: expected one of {', '.join(TRANSFORMERS)}, got {name!r}. Choose one of them."
        )
    return TRANSFORMERS[name]
