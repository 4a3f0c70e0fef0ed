"""Models to plan for: by name, by number of parameters, by a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from zero_ext.plan.config_readers import shape_of_file
from zero_ext.plan.parse_sizes import COUNTS, count_of, short_number
from zero_ext.plan.simulation.transformer_cost import (
    TRANSFORMERS,
    ModelCost,
    TensorGroup,
    Transformer,
    UnitCost,
)

LARGEST_TILE = 1_000_000_000  # elements; 2 GB in 16 bits


@dataclass(frozen=True)
class ModelSpec:
    """The model that is planned for.

    Attributes:
        shape: its sizes; ``tiles`` is the number of units that a layer is cut into in stage 3.
        parameters: elements, with those of all experts. Where the shape has others, every unit is scaled.
        source: what the model was read from, in words.
    """

    shape: Transformer
    parameters: int
    source: str

    @classmethod
    def of_shape(cls, shape: Transformer, source: str, parameters: int = 0) -> ModelSpec:
        """``shape`` with layers cut into tiles that are not too large; ``parameters`` 0 takes its own."""
        if shape.mixture is None:
            tiles = max(shape.tiles, -(-sum(shape.layer_matrices) // LARGEST_TILE))
            shape = replace(shape, tiles=tiles)
        return cls(shape, parameters or shape.parameters, source)

    @property
    def name(self) -> str:
        """For tables."""
        return self.shape.name

    def with_sequence(self, sequence: int) -> ModelSpec:
        """Return the same with samples of ``sequence`` tokens."""
        return replace(self, shape=replace(self.shape, sequence=sequence))

    def with_experts_over(self, ep_size: int) -> ModelSpec:
        """Return the same with each layer's experts spread over ``ep_size`` ranks.

        Raises ``ValueError`` for a model without experts, and a number that does not divide them.
        """
        mixture = self.shape.mixture
        if mixture is None and ep_size == 1:
            return self
        if mixture is None:
            raise ValueError(
                f"ep: expected 1 for {self.name}, which has no mixture of experts, got {ep_size}. Leave it "
                "out."
            )
        return replace(self, shape=replace(self.shape, mixture=replace(mixture, ep_size=ep_size)))

    @property
    def ep_size(self) -> int:
        """Ranks that the experts of each layer are spread over."""
        return 1 if self.shape.mixture is None else self.shape.mixture.ep_size

    @property
    def active_parameters(self) -> int:
        """Elements that one token passes."""
        return self.parameters if self.shape.mixture is None else self.shape.active_parameters

    @cached_property
    def full_cost(self) -> ModelCost:
        """All units."""
        return self.cost()

    def cost(self, tp_size: int = 1) -> ModelCost:
        """Return all units as one of ``tp_size`` ranks has them that share every layer's tensors. Tensors
        that are split are not cut into tiles.
        """
        own = cost = self.shape.cost()
        if self.shape.mixture is not None:
            return replace(self.shape, tp_size=tp_size).cost()  # refuses more than one
        if tp_size > 1:
            cost = replace(self.shape, tp_size=tp_size, tiles=1).cost()
        scale = self.parameters / own.parameters
        if scale == 1:
            return cost
        scaled = {unit: _scaled(unit, scale) for unit in set(cost.units)}
        units = [scaled[unit] for unit in cost.units]
        if tp_size == 1:
            rest = self.parameters - sum(unit.parameters for unit in units[:-1])
            units[-1] = replace(units[-1], parameters=max(rest, 0))
        groups = {group: _group_scaled(group, scale) for group in set(cost.groups)}
        return replace(cost, units=tuple(units), groups=tuple(groups[group] for group in cost.groups))


def _group_scaled(group: TensorGroup, scale: float) -> TensorGroup:
    matrices = tuple(int(matrix * scale) for matrix in group.matrices)
    return replace(group, matrices=matrices, vectors=int(group.vectors * scale))


def _scaled(unit: UnitCost, scale: float) -> UnitCost:
    return replace(unit, parameters=int(unit.parameters * scale), forward_flops=unit.forward_flops * scale)


_GPT2 = Transformer("gpt2", 768, 12, 12, 50257, 1024, before=1024 * 768, fused_attention=True)
_BLOOM = Transformer("bloom-560m", 1024, 24, 16, 250880, 2048, before=2 * 1024)
_LLAMA_3 = replace(
    TRANSFORMERS["llama-7b"],
    name="llama-3-8b",
    vocabulary=128256,
    feed_forward=14336,
    key_value_heads=8,
    sequence=8192,
)
_GPT = TRANSFORMERS["gpt-1t"]

# Layers and hidden sizes of 10T and 100T: ZeRO-Infinity (arXiv 2104.07857), figure 2a, in round numbers; of
# 6.7B and 13B: GPT-3 (arXiv 2005.14165), table 2.1.
_MORE = (
    _GPT2,
    replace(_GPT2, name="gpt2-medium", hidden=1024, layers=24, heads=16, before=1024 * 1024),
    replace(_GPT2, name="gpt2-large", hidden=1280, layers=36, heads=20, before=1024 * 1280),
    replace(_GPT2, name="gpt2-xl", hidden=1600, layers=48, heads=25, before=1024 * 1600),
    _BLOOM,
    replace(_BLOOM, name="bloom-7b1", hidden=4096, layers=30, heads=32, before=2 * 4096),
    replace(_BLOOM, name="bloom-176b", hidden=14336, layers=70, heads=112, before=2 * 14336),
    _LLAMA_3,
    replace(_LLAMA_3, name="llama-3-70b", hidden=8192, layers=80, heads=64, feed_forward=28672),
    replace(_GPT, name="gpt-1.5b", hidden=1600, layers=48, heads=25, tiles=1),
    replace(_GPT, name="gpt-6.7b", hidden=4096, layers=32, heads=32, sequence=2048, tiles=1),
    replace(_GPT, name="gpt-13b", hidden=5120, layers=40, heads=40, sequence=2048, tiles=1),
    replace(_GPT, name="gpt-10t", hidden=65536, layers=195, heads=512, tiles=52),
    replace(_GPT, name="gpt-100t", hidden=163840, layers=315, heads=1024, tiles=80),
)

PRESETS = {shape.name: shape for shape in (*TRANSFORMERS.values(), *_MORE)}

_HIDDEN_OF_A_HEAD = 128
_FEWEST_LAYERS = 2
_MANY_HEADS = 8  # with fewer, a whole head more or less would change the size too much


def shape_of_count(parameters: int) -> Transformer:
    """Return a GPT of about ``parameters``: the depth of the next larger preset, and the width that goes with
    it.
    """
    family = sorted(
        (shape for name, shape in PRESETS.items() if name.startswith("gpt-")),
        key=lambda shape: shape.layers * shape.hidden**2,
    )
    like = min(family, key=lambda shape: abs(math.log(12 * shape.layers * shape.hidden**2 / parameters)))
    # Small ones get shallower in the measure in which they get narrower.
    ratio = parameters / (12 * like.layers * like.hidden**2)
    layers = max(_FEWEST_LAYERS, round(like.layers * min(1.0, ratio ** (1 / 3))))
    hidden = math.sqrt(parameters / (12 * layers))
    heads = max(1, round(hidden / _HIDDEN_OF_A_HEAD))
    wide = heads * (_HIDDEN_OF_A_HEAD if heads >= _MANY_HEADS else max(1, round(hidden / heads)))
    vocabulary = min(like.vocabulary, max(1, parameters // (10 * wide)))
    return replace(
        like, name="", hidden=wide, layers=layers, heads=heads, vocabulary=vocabulary, sequence=2048, tiles=1
    )


FEWEST, MOST = 1000, 10**15  # parameters


def model_of_file(path: Path) -> ModelSpec:
    """Read a ``config.json``.

    Raises ConfigError (a ValueError) naming the file and the keys for anything that is no JSON object, sizes
    that are missing, of another type or out of bounds, and models of no known kind.
    """
    shape, kind = shape_of_file(path)
    return ModelSpec.of_shape(shape, f"{path} ({kind})")


def model_named(model: str, sequence: int | None = None) -> ModelSpec:
    """Return a preset, a number of parameters (``7.5B``), a Hugging Face ``config.json``, or a folder with
    one; with samples of ``sequence`` tokens if that is said.

    Raises ValueError for anything else, naming the presets, and for a file that cannot be used, naming its
    keys.
    """
    found = _resolved(model)
    return found if sequence is None else found.with_sequence(sequence)


def _resolved(model: str) -> ModelSpec:
    path = Path(model)
    if model and (path / "config.json").is_file():
        return model_of_file(path / "config.json")
    if path.is_file() or path.suffix == ".json":
        return model_of_file(path)
    shape = PRESETS.get(model.lower()) or PRESETS.get(f"gpt-{model.lower()}")
    if shape is not None:
        return ModelSpec.of_shape(shape, f"preset {shape.name}")
    count = count_of(model)
    if count is None and model and path.is_dir():
        return model_of_file(path / "config.json")
    if count is None:
        raise ValueError(
            "MODEL: expected a config.json, a folder that has one, a number of parameters like 7.5B, or "
            f"one of {', '.join(PRESETS)}, got {model!r}. Pass one of these."
        )
    if not FEWEST <= count <= MOST:
        raise ValueError(
            f"MODEL: expected {FEWEST:,} to {MOST:,} parameters, got {model!r}. Pass a number in this range."
        )
    name = short_number(count, tuple(COUNTS)).replace(" ", "")
    shape = replace(shape_of_count(count), name=name)
    source = f"{count:,} parameters, as a GPT of {shape.layers} layers and hidden size {shape.hidden}"
    return ModelSpec.of_shape(shape, source, count)
