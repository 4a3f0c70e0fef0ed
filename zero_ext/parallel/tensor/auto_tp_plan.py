"""Plans for models that bring none along: what looks as if it could be split is tried on a share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

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


class _Seen(NamedTuple):
    """A block's last call in the full model: its arguments, what came to its narrow layer, what that made of
    it, and what the block returned."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    narrow: torch.Tensor
    narrowed: torch.Tensor
    returned: Any


class _Narrow(nn.Module):
    """Stands in for a narrow layer: records its ``inputs``, and returns the ``output`` of the full layer."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output
        self.inputs: list[torch.Tensor] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.inputs.append(value)
        return self.output


def automatic_plan(model: nn.Module, *inputs: Any, ranks: int, **named: Any) -> dict[str, str]:
    """Return a plan for `apply_tensor_parallel`, to be read before it is used.

    Blocks are modules with direct children that are two `nn.Linear` of matching widths, or three (a gate),
    and those with query, key, value and output projections by their usual names and a number of heads.
    `model(*inputs, **named)` is run once, on one process and before anything is split. Then every block is
    tried on the first rank's share of its outputs, which must be those of the full block, as must be what
    the block then returns. Its other side effects are not checked. Other modules and the vocabulary stay
    unsplit.

    Args:
        model: the full model.
        *inputs: of its forward.
        ranks: ranks along "tp".
        **named: keyword arguments of its forward.

    Returns:
        Styles by name of modules.

    Raises:
        ValueError: the model has no blocks, or a block fails its trial: heads or widths that do not divide, a
            norm or softmax over what would be split, a parameter used on a share alone, no number of heads.
            Give a plan by hand then.

    Examples:
        >>> from zero_ext.parallel import automatic_plan
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> automatic_plan(torch.nn.Sequential(model), torch.ones(2, 4), ranks=2)
        {'0.0': 'colwise', '0.2': 'rowwise'}
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: expected a block of two or three matching nn.Linear or of named "
            "projections, got none. Give a plan by hand."
        )
    seen = _record(model, blocks, inputs, named)
    plan: dict[str, str] = {}
    for block in blocks:
        if block.heads and not block.name:
            raise ValueError(
                f"{type(model).__name__}: it is attention itself, and no plan can name its heads. Put it "
                "into a module."
            )
        if block.name not in seen:
            raise ValueError(
                f"block '{block.name}': it is not called for these inputs. Give others, or a plan by hand."
            )
        problem = _problem(model.get_submodule(block.name), block, ranks, seen[block.name])
        if problem:
            raise ValueError(
                f"block '{block.name}': it cannot be split automatically: {problem}. Give a plan by hand."
            )
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
) -> dict[str, _Seen]:
    """Return what each block did in its last call."""
    narrow: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    seen: dict[str, _Seen] = {}
    hooks = []
    for block in blocks:
        module = model.get_submodule(block.name)

        def reached(_: Any, inputs: Any, made: torch.Tensor, name: str = block.name) -> None:
            narrow[name] = (inputs[0], made)

        def called(_: Any, inputs: Any, options: Any, returned: Any, name: str = block.name) -> None:
            if name in narrow:
                seen[name] = _Seen(inputs, options, *narrow[name], returned)

        hooks.append(module.get_submodule(block.narrow).register_forward_hook(reached))
        hooks.append(module.register_forward_hook(called, with_kwargs=True))
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
    return seen


def _problem(module: nn.Module, block: _Block, ranks: int, seen: _Seen) -> str:
    """Why the first of ``ranks`` shares of ``block`` does not compute its part of what was ``seen``; else
    empty."""
    if block.wide in [wide for wide, _ in _ATTENTION] and not block.heads:
        return f"it has no number of heads ({', '.join(HEADS)})"
    share = copy.deepcopy(module).eval()
    for heads in block.heads:
        if getattr(share, heads) % ranks:
            return f"{heads} is {getattr(share, heads)}, which does not divide by {ranks}"
        setattr(share, heads, getattr(share, heads) // ranks)
    narrow = _Narrow(seen.narrowed)
    setattr(share, block.narrow, narrow)
    between = dict(share.named_parameters())
    for name in block.wide:
        linear: Any = share.get_submodule(name)
        if linear.out_features % ranks:
            return f"'{name}' has {linear.out_features} outputs, which do not divide by {ranks}"
        rows = linear.out_features // ranks
        for each in [each for each in between if each.startswith(f"{name}.")]:
            del between[each]
        linear.weight = nn.Parameter(linear.weight[:rows].detach())
        linear.bias = None if linear.bias is None else nn.Parameter(linear.bias[:rows].detach())
        linear.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
    try:
        with torch.enable_grad():
            returned = share(*seen.inputs, **seen.named)
    except Exception as error:
        return f"its share of the weights stops with {type(error).__name__}: {error}"
    wanted = seen.narrow[..., : seen.narrow.shape[-1] // ranks]
    if len(narrow.inputs) != 1 or not _alike(narrow.inputs[0], wanted):
        return "a share of its outputs is not computed from that share of its weights alone"
    if not _alike(returned, seen.returned):
        return "what it returns depends on a share alone"
    arrived = narrow.inputs[0].sum()
    trained = {name: each for name, each in between.items() if each.requires_grad}
    used = torch.autograd.grad(arrived, [*trained.values()], allow_unused=True) if trained else ()
    shared = [name for name, gradient in zip(trained, used, strict=True) if gradient is not None]
    return f"'{shared[0]}' is used on a share alone, so that its gradient would be one" if shared else ""


def _alike(found: Any, wanted: Any) -> bool:
    """Return whether the tensors in both are the same up to rounding."""
    some, others = (
        [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)] for tree in (found, wanted)
    )
    return len(some) == len(others) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(some, others, strict=True)
    )
