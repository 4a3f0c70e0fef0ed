"""Spreads the fused experts of a model of transformers over ranks, and exchanges tokens between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.parallel.experts import through_experts
from zero_ext.parallel.tensor.tp_styles import ParameterSplit, local_parameters, split_parameter
from zero_ext.zero.units.parameter_marks import (
    adapted_parameters,
    expert_ranks,
    has_marked_experts,
    mark_experts_of,
)
from zero_ext.zero.units.presharded import presharded_of
from zero_ext.zero.units.rank_groups import mesh_lengths
from zero_ext.zero.unshard.expert_routing import described_experts

Model = TypeVar("Model", bound=nn.Module)
_DOWN = "down_proj"
# Set by transformers' decorator of experts that are called with tokens, indices and weights.
_INTERFACE = "_is_expert_parallel"
_ARGUMENTS = 4  # the module itself, tokens, indices and weights
# Experts that are called with as many rows for each of them: the tokens routed there, and zeros.
_BATCHED = "Llama4TextExperts"


def apply_expert_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Spread the experts of a transformers model over mesh["ep"], in place, before `zero_ext.prepare`.

    Each rank along "ep" has equally many neighboring experts of every mixture. Tokens are sent to their
    experts by all-to-all, and the outputs are sent back and weighted. No token is dropped. Routers and shared
    experts stay on all ranks. Every forward, in evaluation too, is a collective of the ranks along "ep".
    Names, state dicts and checkpoints are those of the full model. Nothing is changed on one rank.

    Source: Lepikhin et al., "GShard" (arXiv 2006.16668), section 3.1.

    Args:
        model: A model on every rank, with the same values. Its experts are stacked in parameters such as
            `gate_up_proj` [experts, m, n] and `down_proj`, and are called through transformers' interface of
            experts (Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS and others) or are Llama 4's. It may be on the
            meta device: `prepare(..., init="skip")` and a load of a checkpoint follow.
        mesh: A mesh with the dimension "ep", and no "pp", "cp" or "tp" longer than 1.

    Returns:
        `model`.

    Raises:
        ValueError: The mesh has no dimension "ep", or tensors, layers or sequences are split over it. The
            model has no such experts, or a number of them that "ep" does not divide. Experts have a norm of
            their own, are quantized, sharded already, or spread already. Nothing is changed then.

    Examples:
        On four ranks:

        ```python
        from transformers import MixtralConfig, MixtralForCausalLM
        from zero_ext.parallel import apply_expert_parallel, make_mesh

        mesh = make_mesh(ep=4)
        torch.manual_seed(0)  # the same values on all ranks
        config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
        model = apply_expert_parallel(MixtralForCausalLM(config), mesh)
        assert model.model.layers[0].mlp.experts.num_experts == 2  # of 8
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3}, process_group=mesh)
        ```
    """
    ranks = _ranks_of(mesh)
    stacks = {name: each for name, each in model.named_modules() if _is_stack(each)}
    if not stacks:
        raise ValueError(
            f"{type(model).__name__}: expected a model with experts that are stacked in parameters [experts, "
            f"m, n] and called with tokens, indices and weights, got {described_experts(model) or 'none'}. "
            "Leave apply_expert_parallel and the mesh's 'ep' out, or build the model from MixtureOfExperts."
        )
    for name, module in stacks.items():
        problem = _problem_of(module, ranks)
        if problem:
            raise ValueError(f"experts '{name}' ({type(module).__name__}): {problem}")
    if ranks == 1:
        return model
    own = {each for module in stacks.values() for each in module.parameters()}
    for name, parameter in adapted_parameters(model).items():
        if parameter in own:
            raise ValueError(
                f"expert parameter '{name}': expected no adapters where experts are spread over ranks, got "
                "PEFT's of target_parameters. Set target_modules to other modules, or leave "
                "apply_expert_parallel out."
            )
    group = mesh["ep"].get_group()
    for module in stacks.values():
        _spread(module, mesh["ep"], group)
    return model


def _ranks_of(mesh: DeviceMesh) -> int:
    """Return the ranks along "ep"."""
    lengths = mesh_lengths(mesh)
    if "ep" not in lengths:
        raise ValueError(
            f"mesh: expected one with the dimension 'ep', got {list(lengths)}. Make it by make_mesh(ep=2)."
        )
    longer = {name: length for name, length in lengths.items() if name not in ("dp", "ep") and length > 1}
    if longer:
        raise ValueError(
            "mesh: expected no dimension but 'dp' and 'ep' longer than 1 for experts of transformers, got "
            f"{longer}. Set them to 1, or build the model from MixtureOfExperts."
        )
    return lengths["ep"]


def _is_stack(module: nn.Module) -> bool:
    """Return whether ``module`` has the weights of several experts in one parameter."""
    down = module._parameters.get(_DOWN)
    return down is not None and down.dim() == 3


def _problem_of(module: nn.Module, ranks: int) -> str | None:
    """Return why the experts ``module`` cannot be spread over ``ranks``; None if they can."""
    parameters = dict(module.named_parameters())
    count, kind = parameters[_DOWN].shape[0], inspect.signature(type(module).forward)
    fused = hasattr(module, _INTERFACE) and len(kind.parameters) == _ARGUMENTS
    if not (fused or _is_batched(module)):
        counts = {name: each.shape[0] for name, each in parameters.items() if each.dim() == 3}
        forward = (
            f"a forward {kind}" if len(set(counts.values())) == 1 else f"stacks of different sizes {counts}"
        )
        return (
            "expected experts that transformers calls with tokens, indices and weights through its interface "
            f"of experts, got {forward}. Leave apply_expert_parallel out: ZeRO shards these experts over all "
            "ranks."
        )
    if has_marked_experts(module) or any(map(expert_ranks, parameters.values())):
        return "expected experts on all ranks, got some that are spread already. Call this function once."
    if count % ranks:
        return (
            f"expected a multiple of ep ({ranks}), got {count} experts. Set 'ep' to a divisor of {count} in "
            "make_mesh."
        )
    if getattr(module.forward, "__self__", None) is not module:
        return "expected a forward that is a method, got another one. Call apply_expert_parallel before."
    shared = [name for name, each in parameters.items() if "." in name or each.shape[0] != count]
    if shared or getattr(module, "num_experts", count) != count:
        return (
            f"expected parameters with {count} experts each, got {shared or module.num_experts}. Leave "
            "apply_expert_parallel out: ZeRO shards these experts over all ranks."
        )
    for name, parameter in parameters.items():
        if not parameter.dtype.is_floating_point:
            return f"expected '{name}' unquantized, got {parameter.dtype}. Load it unquantized."
        if presharded_of(parameter) is not None:
            return (
                f"expected '{name}' in full or without values, got one that was sharded while it was made. "
                "Build the model outside of zero_ext.Init, or load it already spread: pass "
                "process_group=mesh to from_pretrained of zero_ext.integrations.transformers."
            )
    return None


def _is_batched(module: nn.Module) -> bool:
    """Return whether the experts ``module`` are called with as many rows for each of them."""
    return any(kind.__name__ == _BATCHED for kind in type(module).__mro__)


def _spread(module: Any, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Leave this rank's experts in ``module``, and send tokens to those of other ranks."""
    count, ranks = module.num_experts, dist.get_process_group_ranks(group)
    for name in list(module._parameters):
        split_parameter(module, name, mesh, ParameterSplit(0, 1))
    mark_experts_of(module, ranks)
    module.num_experts = count // len(ranks)
    exchanging = _exchange_batches if _is_batched(module) else _exchange_choices
    # A method, so that a copy of the module calls the copy's experts.
    module.forward = MethodType(exchanging(module.forward.__func__, count, group), module)


def _exchange_choices(
    forward: Callable[..., torch.Tensor], count: int, group: dist.ProcessGroup
) -> Callable[..., torch.Tensor]:
    """Return the forward of ``count`` experts that is called with tokens, their experts and weights."""
    signature = inspect.signature(forward)

    def exchanging(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, chosen, weights = signature.bind(self, *args, **kwargs).args[1:]

        def own_experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            with local_parameters(self):
                return _call_sorted(MethodType(forward, self), rows, counts)

        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(count, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        made = through_experts(hidden[order // chosen.shape[-1]], counts, own_experts, group)
        slots = made[torch.argsort(order)].view(*chosen.shape, made.shape[-1])
        mixed: torch.Tensor = (slots * weights.unsqueeze(-1)).sum(1)
        return mixed.to(hidden.dtype)

    return exchanging


def _exchange_batches(
    forward: Callable[..., torch.Tensor], count: int, group: dist.ProcessGroup
) -> Callable[..., torch.Tensor]:
    """Return the forward of ``count`` experts that is called with rows [count * tokens, width].

    A row is a token times its router's score, so it is zero where the token is not routed to the expert. Such
    rows have outputs and gradients of zero, as the experts have no biases. Only the others are sent.
    """

    def exchanging(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        def own_experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            with local_parameters(self):
                return _call_batched(MethodType(forward, self), rows, counts)

        routed = (hidden_states.detach() != 0).any(-1).view(count, -1)
        sent = routed.view(-1).nonzero().view(-1)
        made = through_experts(hidden_states[sent], routed.sum(1), own_experts, group)
        return made.new_zeros(hidden_states.shape).index_copy(0, sent, made)

    return exchanging


def _call_sorted(
    forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of ``rows``, ``counts`` of each expert one after another, without weights."""
    numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    if not len(rows):
        # Kernels may refuse no rows at all, and every parameter has to have a gradient.
        empty, numbers = rows.new_zeros(1, rows.shape[1]), numbers.new_zeros(1)
        padded = torch.cat([rows, empty])
        return forward(padded, numbers[:, None], padded.new_ones(1, 1))[:0]
    return forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))


def _call_batched(
    forward: Callable[..., torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of ``rows``, ``counts`` of each expert one after another, padded to equally many."""
    experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    longest = max(int(counts.max()), 1)  # every parameter has to have a gradient
    first = counts.cumsum(0) - counts
    slots = experts * longest + torch.arange(len(rows), device=rows.device) - first[experts]
    batched = rows.new_zeros(len(counts) * longest, rows.shape[1]).index_copy(0, slots, rows)
    return forward(batched)[slots]
