"""The linear head of a language model: plain, split by tensor parallelism, or with adapters of PEFT."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_ext.zero.units.dtensor_local import is_distributed

# Hooks of these modules on a head only gather its weight, or move its input and its logits between ranks. The
# loss does both itself.
_GATHERING_HOOKS = ("zero_ext.zero.unshard.hook_installation",)
_SPLIT_HOOKS = ("torch.distributed.tensor._api", "zero_ext.parallel.tensor.tp_rng")
_WITHOUT = "or remove the section 'loss'."


class HeadTensors(NamedTuple):
    """The arguments of `linear_cross_entropy` that describe a head for its input."""

    weight: Tensor
    bias: Tensor | None
    low_rank: list[tuple[Tensor, Tensor]]


def head_problem(head: Any) -> str | None:
    """Return why the loss of the module ``head`` cannot be computed in chunks, or None."""
    linear, adapted = active_layers(head)
    if type(linear) is not nn.Linear or "forward" in vars(linear) or "forward" in vars(head):
        found = "none" if linear is None else type(linear).__name__
        return (
            f"head: expected a plain nn.Linear from get_output_embeddings(), or one with LoRA, got {found}. "
            f"Leave the head out of other adapters and of quantization, {_WITHOUT}"
        )
    weight = dict(linear.named_parameters(recurse=False))["weight"]  # which gathers nothing in stage 3
    split = is_distributed(weight)
    if is_distributed(weight) and not _is_split_by_words(weight):
        return (
            f"head: expected a weight that is split over its words, got {weight.placements}. Split it by "
            f"'colwise_gather_output', {_WITHOUT}"
        )
    factors = _factors(adapted)
    if split and factors:
        return (
            "head: expected no adapter on a head that tensor parallelism splits, got LoRA. Leave the head "
            f"out of target_modules or of the plan, {_WITHOUT}"
        )
    if problem := _adapter_problem(adapted):
        return problem
    allowed = (*_GATHERING_HOOKS, *(_SPLIT_HOOKS if split else ()))
    if any(getattr(hook, "__module__", "") not in allowed for hook in _hooks({head, linear, *factors})):
        return f"head: expected no hooks, got some, which would not run. Remove them {_WITHOUT}"
    return None


def active_layers(head: Any) -> tuple[Any, Any]:
    """Return the linear layer that computes a head's logits, and PEFT's LoRA layer around it or None."""
    saved: Any = sys.modules.get("peft.utils.other")
    if saved is not None and isinstance(head, saved.ModulesToSaveWrapper):
        names = [] if head.disable_adapters else head.active_adapters
        known = names and all(name in head.modules_to_save for name in names)
        return (head.modules_to_save[names[0]] if known else head.original_module), None
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    if lora is not None and type(head) is lora.Linear:
        return head.get_base_layer(), head
    return head, None


def head_tensors(head: Any, hidden: Tensor, scale: float) -> HeadTensors:
    """Return the tensors of a head that :func:`head_problem` accepts, for logits times ``scale``.

    Args:
        head: the module. Stage 3 gathers its parameters at these reads, for the model's running call.
        hidden: [..., width], not scaled.
        scale: factor of the bias and of the inputs of low rank.
    """
    linear, adapted = active_layers(head)
    weight, bias = linear.weight, linear.bias
    low_rank = []
    for name in _active_adapters(adapted):
        projection, factors = adapted.lora_A[name], adapted.lora_B[name]
        factor = adapted.scaling[name] * scale
        # PEFT's adapters are in float32 over a model in 16 bits. Products are in the model's dtype.
        inputs = adapted._cast_input_dtype(hidden, projection.weight.dtype)
        projected = projection(adapted.lora_dropout[name](inputs)) * factor
        low_rank.append((projected.to(hidden.dtype), factors.weight.to(hidden.dtype)))
        if factors.bias is not None:
            own = (factors.bias * adapted.scaling[name]).to(hidden.dtype)
            bias = own if bias is None else bias + own
    return HeadTensors(weight, bias if bias is None or scale == 1 else bias * scale, low_rank)


def _is_split_by_words(weight: Any) -> bool:
    from torch.distributed.tensor import Shard

    return bool(weight.placements == (Shard(0),))


def _factors(adapted: Any) -> list[nn.Module]:
    return [] if adapted is None else list(adapted.lora_B.values())


def _active_adapters(adapted: Any) -> list[str]:
    if adapted is None or adapted.disable_adapters:
        return []
    return [name for name in adapted.active_adapters if name in adapted.lora_A]


def _adapter_problem(adapted: Any) -> str | None:
    """Return why the logits of a LoRA layer are not those of a low-rank product, or None."""
    if adapted is None:
        return None
    if adapted.merged:
        return f"head: expected an adapter that is not merged, got a merged one. Unmerge it, {_WITHOUT}"
    kinds = [type(each).__name__.removesuffix("LinearVariant") for each in adapted.lora_variant.values()]
    layers = (*adapted.lora_A.values(), *adapted.lora_B.values())
    kinds += [
        type(each).__name__ for each in layers if type(each) is not nn.Linear or "forward" in vars(each)
    ]
    if kinds:
        return (
            f"head: expected plain LoRA on it, got {kinds[0]}. Leave the head out of target_modules, or use "
            f"modules_to_save=['lm_head'], {_WITHOUT}"
        )
    return None


def _hooks(modules: set[nn.Module]) -> list[Any]:
    return [
        hook
        for each in modules
        for hooks in (
            each._forward_hooks,
            each._forward_pre_hooks,
            each._backward_hooks,
            each._backward_pre_hooks,
        )
        for hook in hooks.values()
    ]
