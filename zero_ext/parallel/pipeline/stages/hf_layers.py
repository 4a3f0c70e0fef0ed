"""The layers of a transformers model in execution order: embeddings, blocks, and head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Plan = Mapping[str, Sequence[Sequence[str]]]

# As transformers' ``base_model_pp_plan``, inputs and outputs of each part, for models that bring none along.
_ENCODER: Plan = {
    "embeddings": (["input_ids"], ["hidden_states"]),
    "encoder.layer": (["hidden_states", "attention_mask"], ["hidden_states"]),
}
_PLANS: dict[str, Plan] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "gpt2": {
        "wte": (["input_ids"], ["inputs_embeds"]),
        "wpe": (["position_ids"], ["position_embeds"]),
        "drop": (["inputs_embeds"], ["hidden_states"]),
        "h": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    },
    "bloom": {
        "word_embeddings": (["input_ids"], ["inputs_embeds"]),
        "word_embeddings_layernorm": (["inputs_embeds"], ["hidden_states"]),
        "h": (["hidden_states", "alibi", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    },
}

# Models whose layers give tuples, hidden states first.
_TUPLE_LAYERS = {"bloom"}
_HIDDEN = {"input_ids", "inputs_embeds", "hidden_states"}


@dataclass(frozen=True)
class HfLayers:
    """``groups`` are the names of the modules that run before the layers, of each layer, and of those that
    run behind; ``base`` the base model's name, ``layers`` that of their stack in it, with dots. What
    ``added`` names is added to the hidden states before the layers. ``tuples``: layers give them, hidden
    states first."""

    base: str
    layers: str
    groups: tuple[tuple[str, ...], ...]
    added: frozenset[str]
    tuples: bool

    def group_of(self, parameter: str) -> int:
        """Return the number of the group with a parameter of that name."""
        return next(
            number
            for number, names in enumerate(self.groups)
            if any(parameter.startswith(f"{name}.") for name in names)
        )

    @property
    def path(self) -> tuple[str, ...]:
        """The modules that span several stages: the model, its base, and on to the stack of layers."""
        steps = f"{self.base}.{self.layers}".split(".")
        return tuple(".".join(steps[:depth]) for depth in range(len(steps) + 1))

    def stand_in(self, name: str) -> nn.Module:
        """Return the stand-in of a module that is in another stage."""
        if name in self.added:
            return _ZeroAddend()
        layer = name.startswith(f"{self.base}.{self.layers}.")
        return _PassThrough(in_tuple=layer and self.tuples)


def hf_layers_of(model: Any) -> HfLayers:
    """Return the layers of ``model``, by its own plan or a known one.

    Raises ``ValueError`` for a model without a plan, one with a head for other things than words, parameters
    in none of its parts, and a base model that takes no hidden states.
    """
    base, config = getattr(model, "base_model_prefix", ""), getattr(model, "config", None)
    plan = getattr(config, "base_model_pp_plan", None) or _PLANS.get(getattr(config, "model_type", ""))
    body = getattr(model, base, None) if base else None
    if plan is None or not isinstance(body, nn.Module):
        raise ValueError(
            f"{type(model).__name__}: expected a plan for pipelines (base_model_pp_plan of its "
            "configuration, and a head alongside its base model), got none. Give its layers to "
            "PipelineModule as a list."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__}: expected a head for words, as another may need full sequences, which "
            "later stages do not have, got none. Use a model with one (AutoModelForCausalLM, "
            "AutoModelForMaskedLM)."
        )
    modules = dict(body.named_modules())
    order = [name for name in plan if name in modules]
    stacks = [name for name in order if isinstance(modules[name], nn.ModuleList)]
    if len(stacks) != 1:
        raise ValueError(
            f"plan of {type(model).__name__}: expected one stack of layers, got {stacks}. Give its layers to "
            "PipelineModule as a list."
        )
    cut = order.index(stacks[0])
    before, behind = ([f"{base}.{name}" for name in names] for names in (order[:cut], order[cut + 1 :]))
    heads = [name for name, _ in model.named_children() if name != base]
    layers = [(f"{base}.{stacks[0]}.{number}",) for number in range(len(modules[stacks[0]]))]
    layout = HfLayers(
        base,
        stacks[0],
        (tuple(before), *layers, (*behind, *heads)),
        frozenset(f"{base}.{name}" for name in order[:cut] if not _HIDDEN & set(plan[name][0])),
        getattr(config, "model_type", "") in _TUPLE_LAYERS,
    )
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{each}.") for names in layout.groups for each in names):
            raise ValueError(
                f"{type(model).__name__}: '{name}' {tuple(parameter.shape)} is in no part of the plan "
                f"{order}. Use a model with a head for words alone (AutoModelForCausalLM, "
                "AutoModelForMaskedLM), or give the layers to PipelineModule as a list."
            )
    if "inputs_embeds" not in inspect.signature(body.forward).parameters:
        raise ValueError(
            f"{type(body).__name__}: expected an argument 'inputs_embeds', by which later stages receive "
            "hidden states, got none. Give its layers to PipelineModule as a list."
        )
    return layout


def check_passage(model: Any, body: Any) -> None:
    """Raise ``ValueError`` if ``body``, the base of ``model`` with stand-ins for all of its groups, changes
    its input: it would do so in every stage."""
    parameter = next(model.parameters())
    width = model.config.get_text_config().hidden_size
    hidden_states = torch.linspace(-1, 1, 4 * width, device=parameter.device, dtype=parameter.dtype)
    hidden_states = hidden_states.view(1, 4, width)
    with torch.no_grad():
        found = body(inputs_embeds=hidden_states.clone(), use_cache=False).last_hidden_state
    if not torch.equal(found, hidden_states):
        raise ValueError(
            f"{type(model).__name__}: it changes hidden states outside of its layers, as by a factor on "
            "embeddings, and would in every stage. Give its layers to PipelineModule as a list."
        )


class _PassThrough(nn.Module):
    """Gives back the hidden states, its first argument or ``inputs_embeds``, ``in_tuple`` or as they are."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple

    def forward(
        self,
        hidden: torch.Tensor | None = None,
        *_: Any,
        inputs_embeds: torch.Tensor | None = None,
        **__: Any,
    ) -> Any:
        hidden_states = hidden if inputs_embeds is None else inputs_embeds
        return (hidden_states,) if self._in_tuple else hidden_states


class _ZeroAddend(nn.Module):
    """Zero, 0-d so that it promotes no dtype: what is meant was added in the first stage."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)
