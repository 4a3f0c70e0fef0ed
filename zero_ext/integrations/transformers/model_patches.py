"""Additions to a sharded Hugging Face model besides its engine: marks for its libraries, other methods."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zero_ext.activation import checkpoint_activations
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.api.engine_lookup import MODULE_ATTRIBUTE, engine_of
from zero_ext.zero.api.full_parameters import full_state_dict
from zero_ext.zero.units.parameter_marks import has_spread_experts

# generate(), layer dropping and Seq2SeqTrainer keep the ranks of a model in step that carries this name.
RANKS_IN_STEP = "_is_fsdp_managed_module"
_LEFT_ALONE = "_is_accelerate_prepared"
# What a call of save_pretrained may ask for to have its weights written a tensor at a time.
_STREAMED = {"is_main_process"}


def is_prepared(model: nn.Module) -> bool:
    """Return whether ``model`` is sharded."""
    return vars(model).get(MODULE_ATTRIBUTE) is not None


def mark_prepared(model: nn.Module, optimizer: Any) -> None:
    """Make accelerate leave a sharded model and its optimizer alone, ``generate`` keep the ranks in step,
    ``save_pretrained`` write whole weights, and ``resize_token_embeddings`` an error that says what to do."""
    for each in (model, optimizer):
        if each is not None:
            setattr(each, _LEFT_ALONE, True)
    engine = engine_of(model)
    if engine.world_size > 1 and (engine.config.stage == 3 or has_spread_experts(model)):
        for module in modules_that_ask(model):
            setattr(module, RANKS_IN_STEP, True)
    bind_methods(model)


def modules_that_ask(model: nn.Module) -> list[nn.Module]:
    """Return the modules to have ``RANKS_IN_STEP``: each asks for itself. Those inside a compiled one do not,
    because the compiler takes modules with that name for FSDP's, and leaves them out of graphs."""
    compiled = [each for each in model.modules() if each._compiled_call_impl is not None]
    inside = {inner for each in compiled for inner in each.modules()}
    return [module for module in model.modules() if module not in inside]


def checkpoint_by_configuration(model: nn.Module) -> None:
    """Has the layers of a prepared ``model`` that checkpoint themselves, which ``gradient_checkpointing`` of
    the training arguments turns on, do it as ``activation_checkpointing`` of its configuration says. Without
    that section they stay as they are."""
    if engine_of(model).config.activation_checkpointing == ActivationCheckpointingConfig():
        return
    layer: Any  # torch's stubs let modules have tensors and modules alone
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = checkpoint_activations


class BoundMethod:
    """Stands in for a method of a sharded model: ``body`` gets the model, the method's name and the method.
    On a copy of the model, which is an ordinary one, it is the method itself."""

    def __init__(
        self, model: nn.Module | None, name: str, body: Callable[..., Any], sharded: bool = True
    ) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._name = name
        self._body = body
        self._sharded = sharded

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundMethod:
        model = self._model()
        return BoundMethod(memo.get(id(model), model), self._name, self._body, sharded=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        if model is None:
            raise zero_ext_bug(f"{self._name} of a deleted model was called")
        own = getattr(type(model), self._name, None)
        plain = partial(own, model) if own is not None else getattr(model.base_model, self._name)
        if self._sharded and is_prepared(model):
            return self._body(model, self._name, plain, *args, **kwargs)
        return plain(*args, **kwargs)


def bind_methods(model: nn.Module) -> None:
    """Give a sharded ``model`` of transformers or PEFT its ``save_pretrained``, which writes whole weights,
    its ``generate``, in which ranks do not leave each other, and its ``resize_token_embeddings``, which is an
    error that says what to do."""
    for name, parameter, body in (
        ("save_pretrained", "is_main_process", _save_full),
        ("generate", "synced_gpus", _generate_in_step),
        ("resize_token_embeddings", "new_num_tokens", _refuse_resizing),
    ):
        method = getattr(type(model), name, getattr(model, name, None))
        # The parameter distinguishes it from other functions of its name.
        if method is not None and parameter in inspect.signature(method).parameters:
            setattr(model, name, BoundMethod(model, name, body))


def another_rank_saves(settings: dict[str, Any]) -> bool:
    """Return whether a call of ``save_pretrained`` with these keywords leaves all to the rank that has the
    values.

    Accelerate's ``get_state_dict`` gives them to rank 0 and None to the others, which pass it on.
    """
    without_values = "state_dict" in settings and settings["state_dict"] is None
    return without_values and not settings.get("is_main_process", True)


def _save_full(model: nn.Module, name: str, plain: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the whole weights; all ranks call it, rank 0 writes."""
    if another_rank_saves(kwargs):
        return None
    if args or kwargs.get("state_dict") is not None:
        return plain(folder, *args, **kwargs)
    kwargs = {"is_main_process": engine_of(model).rank == 0, **kwargs}
    # With transformers, which this module does not import: PEFT's models come here too.
    from zero_ext.integrations.transformers.streamed_saving import can_stream, save_streamed

    if kwargs.keys() <= _STREAMED and can_stream(model):
        writes = bool(kwargs["is_main_process"]) and engine_of(model).rank == 0
        save_streamed(model, Path(folder), writes, partial(plain, state_dict={}))
        return None
    kwargs["state_dict"] = full_state_dict(model, rank0_only=True)
    return plain(folder, *args, **kwargs)


def _generate_in_step(model: nn.Module, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate until all ranks are done, also where the caller asks for no such thing: a rank that ends early
    would leave the others in a gather. Inside ``gathered`` and the like nothing is gathered."""
    waits = has_spread_experts(model) or not engine_of(model).prefetcher.borrowers
    if vars(model).get(RANKS_IN_STEP) and waits:
        kwargs = {**kwargs, "synced_gpus": True}
    return plain(*args, **kwargs)


def _refuse_resizing(model: Any, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs:
        return model.get_input_embeddings()
    raise RuntimeError(
        f"{type(model).__name__}.resize_token_embeddings(): it would replace parameters of a sharded model, "
        "which the optimizer has. Call it before train() or evaluate(), or save_model(), load the folder "
        "with from_pretrained, and resize that."
    )
