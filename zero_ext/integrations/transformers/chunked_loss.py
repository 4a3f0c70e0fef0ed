"""The loss of a model's labels through ``linear_cross_entropy``, without logits of all tokens."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from zero_ext.activation import linear_cross_entropy
from zero_ext.activation.chunked_checkpoint import ChunkTokens
from zero_ext.zero.units.dtensor_local import is_distributed

# Hooks of these modules on a head only gather its weight, or move its input and its logits between ranks. The
# loss does both itself.
_GATHERING_HOOKS = ("zero_ext.zero.unshard.hook_installation",)
_SPLIT_HOOKS = ("torch.distributed.tensor._api", "zero_ext.parallel.tensor.tp_rng")
_WITHOUT = "or remove the section 'loss'."


def chunk_loss(model: PreTrainedModel, chunk_tokens: ChunkTokens = "auto") -> None:
    """Compute the loss of a causal language model in chunks of tokens while it trains, in place.

    A forward with `labels` in training mode returns the same `loss`, and `logits` that refuse to be used. In
    evaluation mode, and without labels, the model is unchanged.

    Args:
        model: one with a linear head and transformers' loss of causal language models.
        chunk_tokens: as in [`linear_cross_entropy`][zero_ext.linear_cross_entropy].

    Raises:
        ValueError: the model's loss or head is another one. Nothing was changed.
    """
    if problem := chunking_problem(model):
        raise ValueError(problem)
    head = model.get_output_embeddings()
    unchunk_loss(model)
    path = next(name for name, module in model.named_modules() if module is head)
    register_hooks(model, _LossHooks(path, chunk_tokens, list(inspect.signature(model.forward).parameters)))


def register_hooks(model: nn.Module, hooks: _LossHooks) -> None:
    """Have `hooks` replace the loss of `model`."""
    model.register_forward_pre_hook(hooks.before, with_kwargs=True)
    model.register_forward_hook(hooks.after, always_call=True)


def hooks_of_loss(model: nn.Module) -> _LossHooks | None:
    """Return the hooks that :func:`chunk_loss` has registered on `model`; None without any."""
    hooks: Any  # bound methods among functions
    for hooks in model._forward_pre_hooks.values():
        if _is_of_loss(hooks):
            found: _LossHooks = hooks.__self__
            return found
    return None


def unchunk_loss(model: nn.Module) -> None:
    """Undo :func:`chunk_loss` in ``model`` and the models inside, if it was called."""
    hooks: Any
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_of_loss(hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def _is_of_loss(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), _LossHooks)


def chunking_problem(model: PreTrainedModel, path: str = "") -> str | None:
    """Return why :func:`chunk_loss` refuses ``model``, the module ``path`` of another one, or None."""
    problem = _problem(model, model.get_output_embeddings())
    where = f"module '{path}' ({type(model).__name__})" if path else type(model).__name__
    return problem and f"{where}: {problem}"


def _problem(model: PreTrainedModel, head: Any) -> str | None:
    """Return why the loss of a model cannot be computed in chunks, or None."""
    own_property = type(model).loss_function is not PreTrainedModel.loss_function
    if getattr(model.config, "is_encoder_decoder", False):
        return "expected a causal language model, got an encoder with a decoder. Remove the section 'loss'."
    if "labels" not in inspect.signature(model.forward).parameters:
        return "expected labels among the arguments of forward, got none. Remove the section 'loss'."
    if head is not None and all(module is not head for module in model.modules()):
        return "head: expected one of the model's modules, got another one. Remove the section 'loss'."
    if problem := _head_problem(head):
        return problem
    if own_property or model.loss_function is not ForCausalLMLoss:
        return (
            "loss_function: expected transformers' ForCausalLMLoss, got another one. Call "
            "zero_ext.linear_cross_entropy in it, and remove the section 'loss'."
        )
    return None


class _HeadCall:
    """The head's input during one call of the model, and the head itself."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.hidden: Tensor | None = None
        self.loss_computed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)  # such as the weight's dtype

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        if self.hidden is not None:
            raise RuntimeError(
                "head: expected one call in a forward pass, got a second one. Remove the section 'loss'."
            )
        self.hidden = hidden
        shape = torch.Size((*hidden.shape[:-1], _active_layers(self.head)[0].out_features))
        return DeferredLogits(self, hidden.device, hidden.dtype, shape)


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits that are computed in the loss only: `scale * x`, or `softcap * tanh(scale * x)`.

    Models multiply them by numbers and cap them. Any other use raises `RuntimeError`.
    """

    call: _HeadCall
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> DeferredLogits:
        if function is not torch.tanh or kwargs or not isinstance(args[0], DeferredLogits):
            _refuse(getattr(function, "__name__", str(function)))
        return args[0].tanh()

    def __getattr__(self, name: str) -> NoReturn:
        # Protocols such as __deepcopy__ and names that tensors lack are looked for, and may be absent.
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        _refuse(name)

    def __getitem__(self, index: object) -> NoReturn:
        _refuse("indexing")

    def __iter__(self) -> NoReturn:
        _refuse("iteration")

    def __add__(self, other: object) -> NoReturn:
        _refuse("arithmetic")

    __radd__ = __sub__ = __rsub__ = __pow__ = __matmul__ = __add__

    def __mul__(self, factor: object) -> DeferredLogits:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
            _refuse(f"multiplication by {type(factor).__name__}")
        if self.softcap is None:
            return replace(self, scale=self.scale * factor)
        return replace(self, softcap=self.softcap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> DeferredLogits:
        if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not divisor:
            _refuse(f"division by {type(divisor).__name__}")
        return self * (1 / divisor)

    def tanh(self) -> DeferredLogits:
        """Cap the logits, once."""
        if self.softcap is not None:
            _refuse("a second tanh")
        return replace(self, softcap=1.0)

    def float(self) -> DeferredLogits:
        """Return them as they are: the loss computes in float32 anyway."""
        return self

    def contiguous(self) -> DeferredLogits:
        """Return them as they are."""
        return self

    def to(self, target: object) -> DeferredLogits:
        """Return them as they are, if nothing becomes narrower."""
        if target not in (torch.float32, self.dtype, self.device):
            _refuse(f"conversion to {target}")
        return self


def _refuse(use: str) -> NoReturn:
    raise RuntimeError(
        f"logits: expected no use of them in training with the section 'loss', got {use}. They are never "
        "computed in full. Call the model in evaluation mode or without labels, or remove the section."
    )


class _LossHooks:
    """Hooks that replace a model's head and its loss for one call with labels."""

    def __init__(self, path: str, chunk_tokens: ChunkTokens, parameters: list[str]) -> None:
        self._path, self._parameters = path, parameters
        self.chunk_tokens = chunk_tokens
        self._running: tuple[_HeadCall, dict[str, Any]] | None = None

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put a call that only records its input in the head's place."""
        self._restore(model)  # after a call that an interruption has ended, without the hook behind it
        inputs = dict(zip(self._parameters, args, strict=False)) | kwargs
        if not model.training or inputs.get("labels") is None:
            return
        head = model.get_submodule(self._path)
        if problem := _problem(model, head):
            raise RuntimeError(f"{type(model).__name__}: {problem}")
        call, parent, name = _HeadCall(head), *self._parent(model)
        own = {key: value for key, value in vars(model).items() if key == "_loss_function"}
        self._running = call, own
        # An instance's attribute hides the module of this name, which stays registered.
        vars(parent)[name] = call
        model.loss_function = _loss_of(call, self.chunk_tokens)

    def after(self, model: Any, args: tuple[Any, ...], outputs: Any) -> None:
        """Restore the model, also after an error, where ``outputs`` is None."""
        call = self._restore(model)
        if call is not None and outputs is not None and not call.loss_computed:
            raise RuntimeError(
                f"{type(model).__name__}: expected a forward that calls loss_function with labels, got one "
                "that does not. Remove the section 'loss'."
            )

    def _restore(self, model: Any) -> _HeadCall | None:
        """Restore the head and the loss, and return the call that had replaced them."""
        if self._running is None:
            return None
        (call, own), self._running = self._running, None
        parent, name = self._parent(model)
        vars(parent).pop(name)
        vars(model).pop("_loss_function")
        vars(model).update(own)
        call.hidden = None
        return call

    def _parent(self, model: nn.Module) -> tuple[nn.Module, str]:
        path, _, name = self._path.rpartition(".")
        return model.get_submodule(path), name


def _loss_of(call: _HeadCall, chunk_tokens: ChunkTokens) -> Callable[..., Tensor]:
    """Return the counterpart of ``ForCausalLMLoss``, with its arguments."""

    def loss(
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        hidden, head = call.hidden, call.head
        if not isinstance(logits, DeferredLogits) or hidden is None:
            raise RuntimeError(
                f"logits: expected those of the model's head, got {type(logits).__name__}. Remove the "
                "section 'loss'."
            )
        # The cap of linear_cross_entropy divides by itself inside of tanh.
        scale = logits.scale * (logits.softcap or 1.0)
        weight, bias, low_rank = _head_tensors(head, hidden, scale)
        if weight.shape[0] != vocab_size:
            raise RuntimeError(
                f"vocab_size: expected the {weight.shape[0]} words of the head, got {vocab_size}. Resize the "
                "head or remove the section 'loss'."
            )
        targets = (labels if shift_labels is None else shift_labels).to(hidden.device)
        if shift_labels is not None and targets.numel() == hidden.shape[:-1].numel():
            targets = targets.reshape(hidden.shape[:-1])  # flat, as ForCausalLMLoss accepts them
        found = linear_cross_entropy(
            hidden if scale == 1 else hidden * scale,
            weight,
            targets,
            bias,
            chunk_tokens=chunk_tokens,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            softcap=logits.softcap,
            shift=shift_labels is None,
            low_rank=low_rank,
        )
        call.loss_computed = True
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(found.device)
        return found if num_items_in_batch is None else found / num_items_in_batch

    return loss


class _HeadTensors(NamedTuple):
    """The arguments of `linear_cross_entropy` that describe a head for its input."""

    weight: Tensor
    bias: Tensor | None
    low_rank: list[tuple[Tensor, Tensor]]


def _head_problem(head: Any) -> str | None:
    """Return why the loss of the module ``head`` cannot be computed in chunks, or None."""
    linear, adapted = _active_layers(head)
    if type(linear) is not nn.Linear or "forward" in vars(linear) or "forward" in vars(head):
        found = "none" if linear is None else f"{type(linear).__module__}.{type(linear).__name__}"
        if type(linear) is nn.Linear:
            found = "one with another forward, as of transformers' tp_plan and Accelerate's hooks"
        return (
            f"head: expected a plain nn.Linear from get_output_embeddings(), or one with LoRA, got {found}. "
            f"Leave the head out of other adapters and of quantization, {_WITHOUT}"
        )
    weight: Any = dict(linear.named_parameters(recurse=False))["weight"]  # which gathers nothing in stage 3
    split = is_distributed(weight)
    if split and not _is_split_by_words(weight):
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


def _active_layers(head: Any) -> tuple[Any, Any]:
    """Return the linear layer that computes a head's logits, and PEFT's LoRA layer around it or None."""
    saved: Any = sys.modules.get("peft.utils.other")
    if saved is not None and isinstance(head, saved.ModulesToSaveWrapper):
        names = [] if head.disable_adapters else head.active_adapters
        known = names and all(name in head.modules_to_save for name in names)
        return (head.modules_to_save[names[0]] if known else head.original_module), None
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    if lora is not None and type(head) is lora.Linear:
        return head.base_layer, head  # get_base_layer would skip adapters of other kinds in between
    return head, None


def _head_tensors(head: Any, hidden: Tensor, scale: float) -> _HeadTensors:
    """Return the tensors of a head that :func:`_head_problem` accepts, for logits times ``scale``.

    Args:
        head: the module. Stage 3 gathers its parameters at these reads, for the model's running call.
        hidden: [..., width], not scaled.
        scale: factor of the bias and of the inputs of low rank.
    """
    linear, adapted = _active_layers(head)
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
    return _HeadTensors(weight, bias if bias is None or scale == 1 else bias * scale, low_rank)


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
