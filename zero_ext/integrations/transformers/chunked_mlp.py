"""The feed-forward networks of a model's blocks through ``checkpoint_in_chunks``, found by structure."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zero_ext.activation import checkpoint_in_chunks
from zero_ext.activation.chunked_checkpoint import ChunkTokens, check_chunk_tokens
from zero_ext.integrations.adapter_checks import is_activated
from zero_ext.zero.tiling import Tile, TiledLinear

# Names of a block's feed-forward network in models of transformers.
NAMES = frozenset({"mlp", "feed_forward", "ffn", "ff", "DenseReluDense"})
_EXPERT_NAMES = ("expert", "router")
# Files of torch.nn.modules with layers that compute the output for a token from that token alone.
_TORCH_MODULES = frozenset({"activation", "container", "dropout", "linear"})
_MARK = "_zero_ext_chunk_tokens"


def chunk_mlp(
    model: PreTrainedModel, chunk_tokens: ChunkTokens = "auto", gathered_alone: Collection[str] = ()
) -> None:
    """Compute the feed-forward networks of a model's blocks in chunks of tokens, in place.

    They are the modules named `mlp`, `feed_forward`, `ffn`, `ff` or `DenseReluDense` inside the entries of
    stacks, if they consist of linear layers, activations, norms and dropout. Mixtures of experts are left
    unchanged.

    Args:
        model: one with such a network.
        chunk_tokens: as in [`checkpoint_in_chunks`][zero_ext.checkpoint_in_chunks].
        gathered_alone: names of modules or classes that stage 3 gathers by themselves. Inside a feed-forward
            network they would be gathered for every chunk, and are refused.

    Raises:
        ValueError: there is no such network, or one that has other layers or a replaced `forward`. Nothing
            was changed.
    """
    check_chunk_tokens(chunk_tokens)
    if problem := chunking_problem(model, gathered_alone=gathered_alone):
        raise ValueError(problem)
    for module in _networks(model).values():
        _restore(module)
        module.forward = MethodType(_in_chunks(type(module).forward, chunk_tokens), module)


def unchunk_mlp(model: nn.Module) -> None:
    """Undo :func:`chunk_mlp` in ``model`` and the models inside, if it was called."""
    for module in model.modules():
        _restore(module)


def chunking_problem(
    model: PreTrainedModel, path: str = "", gathered_alone: Collection[str] = ()
) -> str | None:
    """Return why :func:`chunk_mlp` refuses ``model``, the module ``path`` of another one, or None."""
    label = f"module '{path}' ({type(model).__name__})" if path else type(model).__name__
    found = _networks(model)
    if not found:
        return (
            f"{label}: expected blocks with a module named {', '.join(sorted(NAMES))} that is no mixture of "
            "experts, got none. Call zero_ext.checkpoint_in_chunks in it, and remove the section 'mlp'."
        )
    for name, module in found.items():
        if problem := _problem(module, f"{path}.{name}" if path else name, gathered_alone):
            return f"{label}: '{name}' ({type(module).__name__}): {problem}"
    return None


def _networks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the feed-forward networks inside of entries of stacks, by path. Mixtures of experts are none,
    and nothing inside them is."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if name not in NAMES or module in inside or not any(map(str.isdecimal, parent.split("."))):
            continue
        inside.update(module.modules())
        if _is_mixture(module):
            continue
        # MobileBERT lists several in a container, which itself is never called.
        listed = type(module).forward is nn.Module.forward
        found |= (
            {f"{path}.{key}": each for key, each in module.named_children()} if listed else {path: module}
        )
    return found


def _is_mixture(module: nn.Module) -> bool:
    names = [*dict(module.named_modules()), *(name for name, _ in module.named_parameters())]
    owners = [each for each in module.modules() if not type(each).__module__.startswith("torch.")]
    parameters = [each for owner in owners for each in owner.parameters(recurse=False)]
    stacked = any(each.dim() == 3 and each.shape[0] > 1 for each in parameters)
    return stacked or any(expert in name.lower() for name in names for expert in _EXPERT_NAMES)


def _problem(module: nn.Module, path: str, gathered_alone: Collection[str]) -> str | None:
    """Return why ``module`` cannot be computed in chunks of tokens, or None."""
    if "forward" in vars(module) and not is_chunked(module):
        return "expected its own forward, got a replaced one. Restore it, or remove the section 'mlp'."
    for name, each in module.named_modules(prefix=path):
        alone = each is not module and {name, type(each).__name__} & set(gathered_alone)
        if alone or isinstance(each, Tile | TiledLinear):
            return (
                f"expected layers that are gathered with their block, got '{name}', which would be gathered "
                "for every chunk. Remove it from the section 'units', or remove the section 'mlp'."
            )
        if is_activated(each):
            return (
                f"expected adapters of all tokens, got aLoRA in '{name}', which begins at some token of a "
                "row. Use LoRA without alora_invocation_tokens, or remove the section 'mlp'."
            )
        if not _is_of_single_tokens(each):
            return (
                "expected linear layers, activations, norms over the width and dropout, got "
                f"'{name}' ({type(each).__name__}), which may mix tokens. Remove the section 'mlp'."
            )
    return None


def _is_of_single_tokens(module: nn.Module) -> bool:
    """Return whether the module itself, without those inside, computes a token's output from that token."""
    if isinstance(module, nn.Linear | Conv1D):
        return True
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    library, _, file = type(module).__module__.rpartition(".")
    if library == "torch.nn.modules":
        return file in _TORCH_MODULES and not isinstance(module, nn.MultiheadAttention)
    vectors = all(parameter.dim() <= 1 for parameter in module.parameters(recurse=False))
    return vectors and all(buffer.dim() == 0 for buffer in module.buffers(recurse=False))


def _in_chunks(forward: Callable[..., Any], chunk_tokens: ChunkTokens) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    # A function, which becomes a method, so that a copy of the module calls the copy's layers. It is no call
    # of the module: stage 3 gathers for the call around it, and hooks of the module run once.
    @functools.wraps(forward)
    def chunked(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        function: Callable[..., Any] = MethodType(forward, self)
        if kwargs or not all(isinstance(each, Tensor) for each in args):
            args, others = _tensors_first(signature.bind(self, *args, **kwargs))
            function = functools.partial(function, **others)
        return checkpoint_in_chunks(function, *args, chunk_tokens=chunk_tokens)

    setattr(chunked, _MARK, chunk_tokens)
    return chunked


def _tensors_first(bound: inspect.BoundArguments) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors that a forward begins with, and its other arguments by name."""
    owner, *values = bound.args
    tensors = tuple(itertools.takewhile(lambda each: isinstance(each, Tensor), values))
    names = list(bound.signature.parameters)[1 + len(tensors) :]
    others = dict(zip(names, values[len(tensors) :], strict=False)) | bound.kwargs
    if not tensors or any(isinstance(each, Tensor) for each in pytree.tree_leaves(others)):
        raise TypeError(
            f"{type(owner).__name__}: expected tensors [..., tokens, width] before all other arguments, got "
            f"{list(bound.arguments)[1:]}. Remove the section 'mlp'."
        )
    return tensors, others


def is_chunked(module: nn.Module) -> bool:
    """Return whether :func:`chunk_mlp` has changed ``module``."""
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), _MARK)


def _restore(module: nn.Module) -> None:
    if is_chunked(module):
        del module.forward
