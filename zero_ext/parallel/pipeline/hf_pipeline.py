"""A transformers model as a pipeline: a stage runs the model's own forward, without the other layers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.pipeline.stage_layers import weights_of
from zero_ext.parallel.pipeline.stage_module import Loss, StageModule
from zero_ext.zero.units.parameter_marks import mark_tied, shared_names

_Plan = Mapping[str, Sequence[Sequence[str]]]

# As transformers' ``base_model_pp_plan``, inputs and outputs of each part, for models that bring none along.
_ENCODER: _Plan = {
    "embeddings": (["input_ids"], ["hidden_states"]),
    "encoder.layer": (["hidden_states", "attention_mask"], ["hidden_states"]),
}
_PLANS: dict[str, _Plan] = {
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
class _HfLayers:
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
        prefixes = (tuple(f"{name}." for name in names) for names in self.groups)
        return next(number for number, each in enumerate(prefixes) if parameter.startswith(each))

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


def _layers_of(model: Any) -> _HfLayers:
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
    layout = _HfLayers(
        base,
        stacks[0],
        (tuple(before), *layers, (*behind, *heads)),
        frozenset(f"{base}.{name}" for name in order[:cut] if not _HIDDEN & set(plan[name][0])),
        getattr(config, "model_type", "") in _TUPLE_LAYERS,
    )
    known = tuple(f"{each}." for names in layout.groups for each in names)
    for name, parameter in model.named_parameters():
        if not name.startswith(known):
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


def _check_passage(model: Any, body: Any) -> None:
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

    def forward(self, hidden: Any = None, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        hidden_states = hidden if inputs_embeds is None else inputs_embeds
        return (hidden_states,) if self._in_tuple else hidden_states


class _ZeroAddend(nn.Module):
    """Zero, 0-d so that it promotes no dtype: what is meant was added in the first stage."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


def apply_pipeline_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    loss: Loss | None = None,
    schedule: str = "1f1b",
    chunks: int | None = None,
    split: str | Sequence[float] = "parameters",
    inputs: Sequence[str] = ("input_ids",),
) -> HfPipelineModule:
    """Return this rank's stages of a model of transformers, for `zero_ext.prepare` and `Pipeline`.

    The model has a head and a `base_model_pp_plan` (Llama, Qwen, Mistral, GPT-2, BLOOM, BERT and others).
    Every stage keeps its layers, the first the embeddings too, the last the norm and the head. Parameters
    keep their names in the full model, so checkpoints and exports are those of the full model. Masks,
    positions and rotary embeddings are computed in every stage. Shared embeddings stay one parameter. Call
    [`apply_tensor_parallel`][zero_ext.parallel.apply_tensor_parallel] before. `model` is not changed: drop
    your reference.

    Args:
        model: the full model.
        mesh: has the dimension "pp".
        loss: called with the logits and the targets; None is the model's own, to which targets are labels
            [batch, length].
        schedule: as for [`PipelineModule`][zero_ext.parallel.pipeline.PipelineModule].
        chunks: as for `PipelineModule`.
        split: "parameters", "uniform", or a weight for what comes before the layers, each layer, and what
            comes behind them.
        inputs: name, as the model's forward does, what `train_batch` is given: token ids, then what goes to
            every stage, as "attention_mask" [batch, length].

    Returns:
        The stages.

    Raises:
        ValueError: on all ranks alike, a model without a plan, without a head for words, with parameters in
            none of its parts, or one that changes hidden states between its parts; a mesh with "cp" or a
            mixture that balances its experts, without a `loss`; and as `PipelineModule`.
    """
    return HfPipelineModule(model, mesh, loss, schedule, chunks, split, inputs)


class HfPipelineModule(StageModule):
    """This rank's stages of a model of transformers.

    [`apply_pipeline_parallel`][zero_ext.parallel.pipeline.apply_pipeline_parallel] makes it, and documents
    what it takes.

    Args:
        model: the full model.
        mesh: has the dimension "pp".
        loss: called with the logits and the targets; None is the model's own.
        schedule: as for `PipelineModule`.
        chunks: as for `PipelineModule`.
        split: how layers are divided into stages.
        inputs: names of what the forward takes.

    Attributes:
        inputs: as given.

    Raises:
        ValueError: the model, mesh or settings are not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        loss: Loss | None,
        schedule: str,
        chunks: int | None,
        split: str | Sequence[float],
        inputs: Sequence[str],
    ) -> None:
        _check(model, mesh, loss, inputs)
        layout = _layers_of(model)
        _check_passage(model, _cut(model, layout, [], layout.stand_in).get_submodule(layout.base))
        groups = [[model.get_submodule(name) for name in names] for names in layout.groups]
        weights = weights_of([nn.ModuleList(group) for group in groups], split)
        super().__init__(mesh, _own_loss(model) if loss is None else loss, schedule, chunks, weights)
        if self.kind.made is None:
            raise ValueError(
                f"apply_pipeline_parallel: schedule {schedule!r} needs layers that are called one after "
                "another. Give them to PipelineModule as a list."
            )
        self.inputs = tuple(inputs)
        self._base, self._path = layout.base, layout.path
        held = [self.ranges[stage] for stage in self.stages]
        self._names = [[name for group in some for name in layout.groups[group]] for some in held]
        self._views = [_cut(model, layout, some, layout.stand_in) for some in held]
        local = _cut(model, layout, [group for some in held for group in some], lambda name: None)
        for name, child in local.named_children():
            self.add_module(name, child)
        for names in shared_names(model):
            ranks = self.model_ranks(layout.group_of(name) for name in names)
            if len(ranks) > 1:
                mark_tied(model.get_parameter(names[0]), names[0], ranks)

    def forward(self, chunk: int, *inputs: Any) -> Any:
        """Run one of this rank's stages, from token ids to hidden states to logits.

        Args:
            chunk: number of the stage on this rank, from 0.
            *inputs: of the stage.

        Returns:
            What the next stage takes, or the logits.
        """
        stage, view = self.stages[chunk], self._views[chunk]
        for name in self._names[chunk]:  # a module may have been replaced, as by tiles
            owner, _, last = name.rpartition(".")
            view.get_submodule(owner)._modules[last] = self.get_submodule(name)
        for shell in self._path:
            view.get_submodule(shell).training = self.training
        named = dict(zip(self.inputs, inputs, strict=True))
        if stage > 0:
            named["inputs_embeds"] = named.pop(self.inputs[0])
        if stage == len(self.ranges) - 1:
            return view(**named, use_cache=False).logits
        hidden = view.get_submodule(self._base)(**named, use_cache=False).last_hidden_state
        if hidden._is_view():  # GPT-2's is; torch's zero-bubble schedules detach outputs in place
            hidden = hidden.clone()
        return (hidden, *inputs[1:]) if inputs[1:] else hidden

    def chunk_parameters(self, chunk: int) -> Iterator[nn.Parameter]:
        """Return the parameters of one of this rank's stages.

        Args:
            chunk: number of the stage on this rank, from 0.

        Returns:
            The parameters.
        """
        return nn.ModuleList(self.get_submodule(name) for name in self._names[chunk]).parameters()


def _cut(
    model: nn.Module, layout: _HfLayers, held: Sequence[int], stand_in: Callable[[str], nn.Module | None]
) -> nn.Module:
    """Return ``model`` with only the groups ``held``; ``stand_in`` replaces others, or None omits them."""
    elsewhere = {name for group, names in enumerate(layout.groups) if group not in held for name in names}
    shells: dict[str, nn.Module] = {}
    for name in reversed(layout.path):
        module = model.get_submodule(name)
        children: dict[str, nn.Module | None] = {}
        for child, held_module in module.named_children():
            full = f"{name}.{child}" if name else child
            chosen = stand_in(full) if full in elsewhere else shells.get(full, held_module)
            if chosen is not None:
                children[child] = chosen
        shells[name] = copy.copy(module)
        shells[name]._modules = children
    return shells[""]


def _own_loss(model: Any) -> Loss:
    # transformers goes by the class's name, and shifts labels where that says nothing.
    if not model.can_generate() and model.loss_type != "ForMaskedLM":
        raise ValueError(
            f"apply_pipeline_parallel: the loss of {type(model).__name__} does not follow from its name, "
            "which has no 'ForMaskedLM' in it. Give a 'loss' of your own."
        )

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model_loss(logits=logits, labels=labels, vocab_size=vocabulary)
        return found

    model_loss, vocabulary = model.loss_function, model.config.get_text_config().vocab_size
    return loss


def _check(model: nn.Module, mesh: DeviceMesh, loss: Loss | None, inputs: Sequence[str]) -> None:
    if "token_type_ids" in inputs:
        raise ValueError(
            "apply_pipeline_parallel: expected inputs without 'token_type_ids', which stages after the first "
            f"cannot embed, got {list(inputs)}. Leave them out."
        )
    if loss is not None:
        return
    what = ""
    if "cp" in (mesh.mesh_dim_names or ()) and mesh["cp"].size() > 1:
        what = f"'cp' of the mesh is {mesh['cp'].size()}, and the model's own loss needs full sequences"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        what = "the configuration has output_router_logits, and that loss needs the routers of all stages"
    if what:
        raise ValueError(f"apply_pipeline_parallel: {what}. Give a 'loss' of your own.")
