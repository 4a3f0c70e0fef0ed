"""Models of transformers from its own tables: default configurations, shrunk, with generic inputs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.case import Case, adamw, sgd
from tests.zoo.transformers_exclusions import EXCLUDED
from tests.zoo.transformers_inputs import Draw, loss_of, make_inputs, sub_configs
from tests.zoo.transformers_overrides import FIELDS, ILL_CONDITIONED, INPUTS, LARGE_LOSSES, Subconfig
from tests.zoo.transformers_shrink import shrink

# Mappings whose classes have no head. They are used where nothing else is there.
BASES = frozenset({"", "IMAGE", "TEXT_ENCODING"})
GENERATING = frozenset({"CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT"})
NEW_TOKENS = 6


@dataclass(frozen=True)
class Recipe:
    """A class of transformers and what it is used for.

    Attributes:
        class_name: the class, by its name in ``transformers``.
        model_type: the key of its configuration.
        tasks: names of the Auto mappings that contain the class, without prefix and suffix.
    """

    class_name: str
    model_type: str
    tasks: frozenset[str]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Exceptions for the inputs, those of the class before those of the model type."""
        return {**INPUTS.get(self.model_type, {}), **INPUTS.get(self.class_name, {})}


def task_name(mapping: str) -> str:
    """Return the task of a mapping, such as "CAUSAL_LM" for "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"."""
    return mapping.removeprefix("MODEL").removesuffix("MAPPING_NAMES").removeprefix("_FOR").strip("_")


def class_names(value: str | tuple[str, ...] | list[str]) -> list[str]:
    """Return the classes of an entry of a mapping."""
    return [value] if isinstance(value, str) else list(value)


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield task, model type and class for every entry of every mapping."""
    for name, mapping in sorted(vars(modeling_auto).items()):
        if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES"):
            for model_type, value in mapping.items():
                for class_name in class_names(value):
                    yield task_name(name), model_type, class_name


def squeezed(name: str) -> str:
    """Return a name in small letters without separators."""
    return name.replace("-", "").replace("_", "").lower()


@functools.cache
def recipes() -> tuple[Recipe, ...]:
    """Return a recipe for every class with a head, and for base classes where their model type has none."""
    tasks: dict[str, set[str]] = {}
    types: dict[str, list[str]] = {}
    with_head: set[str] = set()
    for task, model_type, class_name in entries():
        tasks.setdefault(class_name, set()).add(task)
        types.setdefault(class_name, []).append(model_type)
        if task not in BASES:
            with_head.add(model_type)
    found = []
    for class_name in sorted(tasks):
        if tasks[class_name] <= BASES and with_head & set(types[class_name]):
            continue
        # Several model types share a class. Its own is the one that its name begins with.
        fitting = [name for name in types[class_name] if squeezed(class_name).startswith(squeezed(name))]
        model_type = max(fitting, key=len) if fitting else types[class_name][0]
        found.append(Recipe(class_name, model_type, frozenset(tasks[class_name])))
    return tuple(found)


@functools.cache
def tiny_config(model_type: str, class_name: str = "") -> Any:
    """Return the shrunk default configuration of a model type. Copy it before use: models change theirs."""
    overrides = {**FIELDS.get(model_type, {}), **FIELDS.get(class_name, {})}
    arguments = overrides.pop("arguments", {})
    # A field "backbone_config": Part("resnet") is the shrunk configuration of another model type.
    arguments, overrides = (
        {name: subconfig(value) if isinstance(value, Subconfig) else value for name, value in values.items()}
        for values in (arguments, overrides)
    )
    return shrink(CONFIG_MAPPING[model_type](**arguments), {**overrides, **arguments})


def subconfig(value: Subconfig) -> Any:
    """Return the configuration that a :class:`Subconfig` names."""
    config = copy.deepcopy(tiny_config(value.model_type))
    if value.out_indices:
        config.out_indices = list(value.out_indices)
    return config


@functools.cache
def signature(class_name: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class's forward method."""
    return inspect.signature(getattr(transformers, class_name).forward).parameters


def config_of(recipe: Recipe) -> Any:
    """Return a fresh configuration for a recipe's class."""
    config = copy.deepcopy(tiny_config(recipe.model_type, recipe.class_name))
    wanted = getattr(transformers, recipe.class_name).config_class
    # Multimodal types list the class of their text model, too, which takes the text configuration.
    config = next((item for item in sub_configs(config) if type(item) is wanted), config)
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if "SEQUENCE_CLASSIFICATION" in recipe.tasks:
        for item in sub_configs(config):
            if getattr(item, "pad_token_id", None) is None:
                item.pad_token_id = 0
    for name, value in recipe.settings.get("config", {}).items():
        setattr(config, name, value)
    return config


def build(recipe: Recipe) -> nn.Module:
    """Return a model with random weights."""
    return getattr(transformers, recipe.class_name)(config_of(recipe))


def batch(recipe: Recipe, step: int) -> dict[str, Any]:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    arguments = signature(recipe.class_name)
    return make_inputs(Draw(config_of(recipe), recipe.tasks, arguments, generator, recipe.settings))


def generate(recipe: Recipe, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the tokens of greedy decoding after a prompt."""
    omitted = {"labels", "decoder_input_ids", "return_loss", *recipe.settings.get("omit_in_generate", ())}
    prompt = {name: value for name, value in inputs.items() if name not in omitted}
    prompt.update(recipe.settings.get("generate", {}))
    return model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


def generates(recipe: Recipe) -> bool:
    """Return whether greedy decoding is part of the case."""
    return bool(recipe.tasks & GENERATING) and recipe.settings.get("generate", True) is not None


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer in which rounding stays small."""
    if recipe.class_name not in ILL_CONDITIONED:
        return adamw(model)
    return sgd(model, lr=1e-7 if recipe.class_name in LARGE_LOSSES else 1e-2)


def case_of(recipe: Recipe) -> Case:
    """Return the case of a class."""
    return Case(
        name=f"transformers/{recipe.class_name}",
        build=functools.partial(build, recipe),
        batch=functools.partial(batch, recipe),
        loss=loss_of,
        generate=functools.partial(generate, recipe) if generates(recipe) else None,
        optimizer=functools.partial(optimizer_of, recipe),
    )


def transformers_cases() -> list[Case]:
    """Return a case for every class that runs in plain torch. Nothing is built yet."""
    return [case_of(recipe) for recipe in recipes() if recipe.class_name not in EXCLUDED]


CASES = transformers_cases()
