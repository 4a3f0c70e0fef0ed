"""Plans for models that bring none along: what looks as if it could be split is tried on a share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
# Names of query, key and value, and of what their attention goes into.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ("out", "output", "dense")),
    (("wq", "wk", "wv"), ("wo",)),
    (("to_q", "to_k", "to_v"), ("to_out",)),
)


class _Block(NamedTuple):
    """Linear layers in a module: the outputs of ``wide`` are split, the inputs of ``narrow``."""

    name: str
    wide: tuple[str, ...]
    narrow: str
    heads: tuple[str, ...]


class _Reached(Exception):
    """Ends a trial where its value is known."""


def automatic_plan(model: nn.Module, *inputs: Any, ranks: int, **named: Any) -> dict[str, str]:
    """A plan for :func:`split_tensors` over ``ranks``, to be read before it is used.

    Blocks are modules with direct children that are two ``nn.Linear`` of matching widths, or three (a gate),
    and those with query, key, value and output projections by their usual names and a number of heads.
    ``model(*inputs, **named)`` is run once, on one process and before anything is split; then every block is
    tried on the first rank's share of its outputs, which must be those of the whole. What is no block stays
    whole, so does the vocabulary.

    Raises ``ValueError`` for a block that fails its trial: heads or widths that do not divide, a norm or
    softmax over what would be split, a parameter used on a share alone, no number of heads; and for a model
    without blocks. Give a plan by hand then.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no block of two or three matching nn.Linear or of named "
            "projections; give a plan by hand"
        )
    calls, wanted = _record(model, blocks, inputs, named)
    plan: dict[str, str] = {}
    for block in blocks:
        if block.name not in wanted:
            raise ValueError(f"'{block.name}' is not called for these inputs; give others or a plan by hand")
        problem = _problem(
            model.get_submodule(block.name), block, ranks, calls[block.name], wanted[block.name]
        )
        if problem:
            raise ValueError(f"'{block.name}' cannot be split automatically: {problem}; give a plan by hand")
        dot = f"{block.name}." if block.name else ""
        if block.heads:
            plan[block.name] = "local_heads"
        plan |= {dot + name: "colwise" for name in block.wide} | {dot + block.narrow: "rowwise"}
    return plan


def _blocks(model: nn.Module) -> Iterator[_Block]:
    for name, module in model.named_modules():
        own = {each: child for each, child in module.named_children() if isinstance(child, nn.Linear)}
        for wide, narrow in _ATTENTION:
            last = [each for each in narrow if each in own]
            if all(each in own for each in wide) and last:
                yield _Block(name, wide, last[0], tuple(each for each in HEADS if hasattr(module, each)))
                break
        else:
            *first, final = own or ("",)
            if len(own) in (2, 3) and all(_matches(own[each], own[final]) for each in first):
                yield _Block(name, tuple(first), final, ())


def _matches(wide: nn.Linear, narrow: nn.Linear) -> bool:
    there = (wide.in_features, wide.out_features) == (narrow.out_features, narrow.in_features)
    return there and wide.in_features != wide.out_features


def _record(
    model: nn.Module, blocks: list[_Block], inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What each block was called with last, and what its narrow layer was."""
    calls: dict[str, Any] = {}
    wanted: dict[str, torch.Tensor] = {}
    hooks = []
    for block in blocks:
        module = model.get_submodule(block.name)

        def called(_: Any, given: Any, options: Any, name: str = block.name) -> None:
            calls[name] = (given, options)

        def reached(_: Any, given: Any, name: str = block.name) -> None:
            wanted[name] = given[0]

        hooks.append(module.register_forward_pre_hook(called, with_kwargs=True))
        hooks.append(module.get_submodule(block.narrow).register_forward_pre_hook(reached))
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return calls, wanted


def _problem(module: nn.Module, block: _Block, ranks: int, call: Any, wanted: torch.Tensor) -> str:
    """Why the first of ``ranks`` shares of ``block`` does not compute its part of ``wanted``; else empty."""
    if block.wide in [wide for wide, _ in _ATTENTION] and not block.heads:
        return f"it has no number of heads ({', '.join(HEADS)})"
    share = copy.deepcopy(module).eval()
    for heads in block.heads:
        if getattr(share, heads) % ranks:
            return f"{heads} is {getattr(share, heads)}, which does not divide by {ranks}"
        setattr(share, heads, getattr(share, heads) // ranks)
    others = {id(each): name for name, each in share.named_parameters()}
    found: list[torch.Tensor] = []
    for name in (*block.wide, block.narrow):
        linear: Any = share.get_submodule(name)
        for each in linear.parameters():
            others.pop(id(each))
        if name == block.narrow:
            linear.register_forward_pre_hook(lambda _, given: _end(found, given[0]))
        elif linear.out_features % ranks:
            return f"'{name}' has {linear.out_features} outputs, which do not divide by {ranks}"
        else:
            rows = linear.out_features // ranks
            linear.weight = nn.Parameter(linear.weight[:rows].detach())
            linear.bias = None if linear.bias is None else nn.Parameter(linear.bias[:rows].detach())
            linear.register_forward_pre_hook(lambda _, given: given[0].detach())
    try:
        with torch.enable_grad():
            share(*call[0], **call[1])
    except _Reached:
        pass
    except Exception as error:
        return f"its share of the weights stops with {type(error).__name__}: {error}"
    part = wanted[..., : wanted.shape[-1] // ranks]
    if not found or found[0].shape != part.shape or not torch.allclose(found[0], part, rtol=1e-4, atol=1e-5):
        return "a share of its outputs is not computed from that share of its weights alone"
    between = [each for each in share.parameters() if id(each) in others and each.requires_grad]
    used = torch.autograd.grad(found[0].sum(), between, allow_unused=True) if between else ()
    shared = [others[id(each)] for each, gradient in zip(between, used, strict=True) if gradient is not None]
    return f"'{shared[0]}' is used on a share alone, so that its gradient would be one" if shared else ""


def _end(found: list[torch.Tensor], value: torch.Tensor) -> None:
    found.append(value)
    raise _Reached
