"""Well-known shapes by name, and a shape for any number of parameters."""

from __future__ import annotations

import math
from dataclasses import replace

from zero_ext.plan.simulation.transformer_cost import TRANSFORMERS, Transformer

_GPT2 = Transformer("gpt2", 768, 12, 12, 50257, 1024, before=1024 * 768, fused_attention=True)
_BLOOM = Transformer("bloom-560m", 1024, 24, 16, 250880, 2048, before=2 * 1024)
_LLAMA = TRANSFORMERS["llama-7b"]
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
    replace(
        _LLAMA, name="llama-3-8b", vocabulary=128256, feed_forward=14336, key_value_heads=8, sequence=8192
    ),
    replace(
        _LLAMA,
        name="llama-3-70b",
        hidden=8192,
        layers=80,
        heads=64,
        vocabulary=128256,
        feed_forward=28672,
        key_value_heads=8,
        sequence=8192,
    ),
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


def preset_named(name: str) -> Transformer | None:
    """Return a shape of :data:`PRESETS` by its name, with or without ``gpt-`` before it; None if there is
    none.
    """
    lowered = name.lower()
    return PRESETS.get(lowered) or PRESETS.get(f"gpt-{lowered}")


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
