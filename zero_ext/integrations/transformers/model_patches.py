"""The additions of a Hugging Face model besides its engine: marks that its libraries look for, and saving."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.api.engine_lookup import MODULE_ATTRIBUTE, engine_of
from zero_ext.zero.api.full_parameters import full_state_dict

# generate(), layer dropping and Seq2SeqTrainer keep the ranks of a model in step that carries this name.
_RANKS_IN_STEP = "_is_fsdp_managed_module"
_LEFT_ALONE = "_is_accelerate_prepared"


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
    if engine.config.stage == 3 and engine.world_size > 1:
        for module in model.modules():  # each asks for itself
            setattr(module, _RANKS_IN_STEP, True)
    bind_methods(model)


def bind_methods(model: nn.Module) -> None:
    """Give a sharded ``model`` of transformers or PEFT its ``save_pretrained``, which writes whole weights,
    and its ``resize_token_embeddings``, which is an error that says what to do."""
    for kind in (_SavePretrained, _ResizeTooLate):
        method = getattr(type(model), kind.name, getattr(model, kind.name, None))
        if method is not None and kind.parameter in inspect.signature(method).parameters:
            setattr(model, kind.name, kind(model))


def another_rank_saves(settings: dict[str, Any]) -> bool:
    """Return whether a call of ``save_pretrained`` with these keywords leaves all to the rank that has the
    values.

    Accelerate's ``get_state_dict`` gives them to rank 0 and None to the others, which pass it on.
    """
    without_values = "state_dict" in settings and settings["state_dict"] is None
    return without_values and not settings.get("is_main_process", True)


class _BoundToModel(ABC):
    """A method of a sharded model; on a copy of the model, which is an ordinary one, the class's own."""

    name = ""
    parameter = ""  # by which the method is told from others of its name

    def __init__(self, model: nn.Module | None, sharded: bool = True) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._sharded = sharded

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        return type(self)(memo.get(id(model), model), sharded=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise zero_ext_bug(f"{self.name} of a deleted model was called")
        if self._sharded and is_prepared(model):
            return self._call(model, *args, **kwargs)
        return getattr(type(model), self.name)(model, *args, **kwargs)

    @abstractmethod
    def _call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the method on a sharded model."""


class _SavePretrained(_BoundToModel):
    """``save_pretrained`` with the whole weights; all ranks call it, rank 0 writes."""

    name = "save_pretrained"
    parameter = "is_main_process"

    def _call(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if another_rank_saves(kwargs):
            return None
        if not args and kwargs.get("state_dict") is None:
            writes = engine_of(model).rank == 0
            kwargs = {"is_main_process": writes, **kwargs}
            kwargs["state_dict"] = full_state_dict(model, rank0_only=True)
        return getattr(type(model), self.name)(model, save_directory, *args, **kwargs)


class _ResizeTooLate(_BoundToModel):
    """``resize_token_embeddings`` after sharding."""

    name = "resize_token_embeddings"
    parameter = "new_num_tokens"

    def _call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return model.get_input_embeddings()  # type: ignore[operator]
        raise RuntimeError(
            f"{type(model).__name__}.resize_token_embeddings(): it would replace parameters of a sharded "
            "model, "
            "which the optimizer has. Call it before train() or evaluate(), or save_model(), load the folder "
            "with from_pretrained, and resize that."
        )
