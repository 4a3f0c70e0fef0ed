"""A transformers model as a pipeline: a stage runs the model's own forward, without the other layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.pipeline.stages.hf_layers import HfLayers, check_passage, hf_layers_of
from zero_ext.parallel.pipeline.stages.stage_layers import weights_of
from zero_ext.parallel.pipeline.stages.stage_module import Loss, StageModule
from zero_ext.zero.units.parameter_marks import mark_tied, shared_names


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
        layout = hf_layers_of(model)
        check_passage(model, _cut(model, layout, [], layout.stand_in).get_submodule(layout.base))
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
            ranks = sorted({*self.model_ranks([self.holders[layout.group_of(name)] for name in names])})
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
    model: nn.Module, layout: HfLayers, held: Sequence[int], stand_in: Callable[[str], nn.Module | None]
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
