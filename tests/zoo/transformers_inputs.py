"""Inputs for the forward methods of transformers' models, chosen by the names of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.zoo.transformers_shrink import is_config, is_int, special_tokens, values_of

BATCH = 2
LENGTH = 12
SAMPLES = 8000
AUDIO_STEPS = 64
CHOICES = 2


def sub_configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and all its sub-configurations, outer ones first."""
    level = [config]
    while level:
        yield from level
        level = [value for item in level for value in values_of(item).values() if is_config(value)]


def find(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first field with one of the names in a tree of configurations."""
    for item in sub_configs(config):
        stored = vars(item)
        for name in names:
            if stored.get(name) is not None:
                return stored[name]
    return default


@dataclass
class Draw:
    """Random inputs of one step.

    Attributes:
        config: the shrunk configuration.
        tasks: names of the Auto mappings that contain the class.
        signature: the arguments of the class's forward method.
        generator: the source of the random numbers.
        settings: exceptions for this model, from the table of overrides.
    """

    config: Any
    tasks: frozenset[str]
    signature: Mapping[str, inspect.Parameter]
    generator: torch.Generator
    settings: Mapping[str, Any]

    def setting(self, name: str, default: Any) -> Any:
        """Return an exception for this model, or the default."""
        return self.settings.get(name, default)

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.setting("length", LENGTH)

    def integers(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        """Return random integers from ``low`` to ``high - 1``."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Return random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator)

    def token_ids(self, *shape: int) -> torch.Tensor:
        """Return random token ids without special tokens."""
        vocabulary = find(self.config, "vocab_size", "vocabulary_size", default=100)
        special = set(special_tokens(self.config).values())
        vocabulary = min(vocabulary, max(4, 128 - len(special)))
        return self.integers(vocabulary, *shape, low=min(4, vocabulary - 1))

    def text_shape(self) -> tuple[int, ...]:
        """Return the shape of the token ids."""
        if "MULTIPLE_CHOICE" in self.tasks:
            return (BATCH, CHOICES, self.length)
        return (BATCH, self.length)

    def image_side(self) -> tuple[int, int]:
        """Return height and width of the images."""
        side = self.setting("image_size", find(self.config, "image_size", "img_size", default=64))
        if is_int(side):
            return side, side
        if isinstance(side, Mapping):
            return side["height"], side["width"]
        return tuple(side)[-2:]

    def images(self) -> torch.Tensor:
        """Return images, or videos where the setting "frames" or the task asks for them."""
        channels = self.setting(
            "channels", find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        )
        if "grid_thw" in required(self):
            return flat_patches(self)
        steps = self.setting("frames", find(self.config, "num_frames", "frames_per_clip", default=4))
        if "images" in self.settings:
            return self.normal(BATCH, self.settings["images"], channels, *self.image_side())
        if "VIDEO_CLASSIFICATION" in self.tasks or "frames" in self.settings:
            return self.normal(BATCH, steps, channels, *self.image_side())
        return self.normal(BATCH, channels, *self.image_side())

    def features(self) -> torch.Tensor:
        """Return log-mel features."""
        names = (
            "num_mel_bins",
            "feature_projection_input_dim",
            "feature_projection_input_dim",
            "feature_size",
            "input_feat_per_channel",
            "n_mels",
            "input_dim",
        )
        bins = self.setting("bins", find(self.config, *names, default=80))
        steps = self.setting("audio_frames", AUDIO_STEPS)
        layout = self.setting("features", "time_first")
        if layout == "time_first":
            return self.normal(BATCH, steps, bins)
        if layout == "bins_first":
            return self.normal(BATCH, bins, steps)
        return self.normal(BATCH, 1, steps, bins)

    def waveforms(self) -> torch.Tensor:
        """Return audio samples, or features where the model calls those input values."""
        if "bins" in self.settings:
            return self.features()
        samples = self.setting("samples", SAMPLES)
        channel = (1,) if self.setting("waveform_channel", False) else ()
        return self.normal(BATCH, *channel, samples)

    def patches(self) -> int:
        """Return the number of patches of an image."""
        height, width = self.image_side()
        patch = find(self.config, "patch_size", default=16)
        patch = patch if is_int(patch) else patch[0]
        return self.setting("patches", (height // patch) * (width // patch))

    def boxes(self) -> torch.Tensor:
        """Return a bounding box for every token."""
        corners = self.integers(20, *self.text_shape(), 2)
        return torch.cat([corners, corners + 10], dim=-1)


def flat_patches(draw: Draw) -> torch.Tensor:
    """Return the patches of all images, one per row, for models that take images of any size."""
    patch = find(draw.config, "patch_size", default=8)
    steps = find(draw.config, "temporal_patch_size", default=1)
    steps = draw.setting("temporal", steps)
    channels = find(draw.config, "num_channels", "in_channels", "in_chans", default=3)
    return draw.normal(BATCH * 16, channels * steps * patch * patch)


def image_mask(draw: Draw) -> torch.Tensor:
    """Return which patches are masked, as many in every image."""
    count = draw.patches()
    order = torch.arange(count) < max(1, count // 2)
    return torch.stack([order[torch.randperm(count, generator=draw.generator)] for _ in range(BATCH)])


def labels(draw: Draw) -> torch.Tensor | None:
    """Return labels of the kind that a task asks for, or None."""
    tasks = draw.tasks
    classes = getattr(draw.config, "num_labels", 2)
    if "CTC" in tasks or draw.setting("labels", "") == "ctc":
        return draw.integers(20, BATCH, 4, low=4)
    per_example = {
        "SEQUENCE_CLASSIFICATION",
        "IMAGE_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "AUDIO_CLASSIFICATION",
    }
    if tasks & (per_example | {"NEXT_SENTENCE_PREDICTION", "AUDIO_XVECTOR", "TIME_SERIES_CLASSIFICATION"}):
        return draw.integers(classes, BATCH)
    if "MULTIPLE_CHOICE" in tasks:
        return draw.integers(CHOICES, BATCH)
    if "TOKEN_CLASSIFICATION" in tasks:
        return draw.integers(classes, BATCH, draw.length)
    if "SEMANTIC_SEGMENTATION" in tasks:
        return draw.integers(classes, BATCH, *draw.image_side())
    text = {
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "SPEECH_SEQ_2_SEQ",
        "MULTIMODAL_LM",
    }
    if tasks & text or ("PRETRAINING" in tasks and "input_ids" in draw.signature):
        return draw.token_ids(BATCH, draw.length)
    return None


def input_ids(draw: Draw) -> torch.Tensor:
    """Return token ids. Encoder-decoders classify at the end-of-sequence token, so there is one."""
    ids = draw.token_ids(*draw.text_shape())
    end = getattr(draw.config, "eos_token_id", None)
    if (
        "SEQUENCE_CLASSIFICATION" in draw.tasks
        and is_int(end)
        and getattr(draw.config, "is_encoder_decoder", False)
    ):
        ids[..., -1] = end
    return ids


def ones_like_tokens(draw: Draw) -> torch.Tensor:
    """Return an attention mask without padding, for tokens or for frames of audio."""
    if draw.setting("audio_mask", False):
        return torch.ones(BATCH, draw.setting("audio_frames", AUDIO_STEPS), dtype=torch.long)
    return torch.ones(draw.text_shape(), dtype=torch.long)


# What is passed wherever a forward method has an argument of this name.
MAKERS: dict[str, Callable[[Draw], Any]] = {
    "input_ids": input_ids,
    "attention_mask": ones_like_tokens,
    "bbox": Draw.boxes,
    "pixel_values": Draw.images,
    "input_features": Draw.features,
    "input_values": Draw.waveforms,
    "bool_masked_pos": image_mask,
    "labels": labels,
    "start_positions": lambda draw: draw.integers(draw.length, BATCH),
    "end_positions": lambda draw: draw.integers(draw.length, BATCH),
    "next_sentence_label": lambda draw: draw.integers(2, BATCH),
    "return_loss": lambda draw: True,
}

# What is passed only where the argument has no default, or where the overrides ask for it.
ON_DEMAND: dict[str, Callable[[Draw], Any]] = {
    "decoder_input_ids": lambda draw: draw.token_ids(BATCH, draw.length),
    "token_type_ids": lambda draw: torch.zeros(draw.text_shape(), dtype=torch.long),
    "pixel_values_videos": lambda draw: draw.normal(BATCH, draw.setting("frames", 4), 3, *draw.image_side()),
    "global_attention_mask": lambda draw: torch.arange(draw.length).eq(0).long().expand(draw.text_shape()),
    "grid_thw": lambda draw: torch.tensor([[1, 4, 4]] * BATCH),
    "hidden_states": lambda draw: flat_patches(draw),
    "input_features_mask": lambda draw: torch.ones(
        BATCH, draw.setting("audio_frames", AUDIO_STEPS), dtype=torch.long
    ),
    "past_values": lambda draw: draw.normal(BATCH, find(draw.config, "context_length", default=32), 1),
    "qformer_input_ids": lambda draw: draw.token_ids(BATCH, draw.length),
    "question_positions": lambda draw: draw.integers(draw.length, BATCH, 1),
    "pixel_mask": lambda draw: torch.ones(BATCH, *draw.image_side(), dtype=torch.long),
}


def required(draw: Draw) -> list[str]:
    """Return the arguments that have no default."""
    return [
        name
        for name, parameter in draw.signature.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def is_text_only(draw: Draw) -> bool:
    """Tell whether a multimodal model is trained on text alone: the default where media are tokens."""
    tokens = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "im_patch_id")
    tasks = {"IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "TEXT_TO_WAVEFORM", "SEQ_TO_SEQ_CAUSAL_LM"}
    multimodal = bool(draw.tasks & tasks) or find(draw.config, *tokens) is not None
    return multimodal and "input_ids" in draw.signature and not draw.setting("media", False)


def names_of(draw: Draw) -> list[str]:
    """Return the arguments to pass."""
    signature = draw.signature
    names = [name for name in MAKERS if name in signature]
    if is_text_only(draw):
        names = [name for name in names if name not in ("pixel_values", "input_features", "input_values")]
    if "input_ids" not in names and "attention_mask" in names and not draw.setting("audio_mask", False):
        names.remove("attention_mask")
    if "bool_masked_pos" in names and not draw.tasks & {"MASKED_IMAGE_MODELING", "PRETRAINING"}:
        names.remove("bool_masked_pos")
    names += [name for name in required(draw) if name in ON_DEMAND or name in MAKERS]
    encoder_decoder = getattr(draw.config, "is_encoder_decoder", False)
    if encoder_decoder and "decoder_input_ids" in signature and labels(draw) is None:
        names.append("decoder_input_ids")
    names += draw.setting("pass", ())
    return [name for name in dict.fromkeys(names) if name not in draw.setting("omit", ())]


def make_inputs(draw: Draw) -> dict[str, Any]:
    """Return the keyword arguments of a training step."""
    extra: Mapping[str, Callable[[Draw], Any]] = draw.setting("make", {})
    makers = {**MAKERS, **ON_DEMAND, **extra}
    names = [*names_of(draw), *(name for name in extra)]
    values = {name: makers[name](draw) for name in dict.fromkeys(names)}
    return {name: value for name, value in values.items() if value is not None}


def float_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from float_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from float_tensors(item)


def distance(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the difference between a tensor and a fixed target.

    Two simpler losses do not do. The mean square of the tensor is constant after a normalization layer, so
    that all gradients are noise, and a linear combination has no minimum, so that training diverges.
    """
    # Logits of tokens that are not there are -inf.
    flat = torch.where(tensor.isfinite(), tensor, 0.0).flatten().float()
    target = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float32))
    return (flat - target).square().mean()


def loss_of(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of a model's output, or a distance to a fixed target where it computes none."""
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.mean()
    return torch.stack([distance(tensor) for tensor in float_tensors(output)]).sum()
