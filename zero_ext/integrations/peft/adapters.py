"""Adapters of a sharded model: which state is theirs, writing it, reading it, and what cannot be done."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.integrations.transformers.model_patches import another_rank_saves
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import full_state_dict, load_full_state_dict
from zero_ext.zero.construction.module_buffers import persistent_buffers
from zero_ext.zero.memory.gathered_unit import UnitState
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.parameter_marks import is_packed

_MERGING = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload")
_CHANGING = ("add_adapter", "load_adapter", "delete_adapter", "add_weighted_adapter")


def adapter_state_dict(
    model: PeftModel, *, rank0_only: bool = True, save_embedding_layers: bool | str = "auto"
) -> dict[str, torch.Tensor]:
    """Return the full values of all that PEFT saves of `model`'s adapters; a collective.

    Only units with a slice of an adapter are gathered.

    Args:
        model: a prepared model with adapters.
        rank0_only: the other ranks get an empty dict.
        save_embedding_layers: as in PEFT's `save_pretrained`.

    Returns:
        Tensors under the model's own keys, as PEFT's `save_pretrained(state_dict=)` and
        `get_peft_model_state_dict(state_dict=)` take them.
    """
    keys = frozenset(_stored_keys(model, list(model.peft_config), save_embedding_layers).values())
    return full_state_dict(model, rank0_only=rank0_only, key_filter=keys.__contains__)


def load_adapter_weights(model: PeftModel, folder: str | os.PathLike[str], adapter: str = "default") -> None:
    """Load the weights that PEFT's `save_pretrained` wrote into an adapter of a sharded model; a collective.

    fp32 values reach the master weights without rounding.

    Args:
        model: a prepared model that has the adapter already.
        folder: that PEFT's `save_pretrained` wrote.
        adapter: its name in the model.

    Raises:
        ValueError: the model has no such adapter, or keys or shapes are those of another; nothing was
            changed.
    """
    if adapter not in model.peft_config:
        raise ValueError(
            f"adapter: expected one of {sorted(model.peft_config)}, got '{adapter}'. Name one of those."
        )
    keys = _stored_keys(model, [adapter], "auto")
    found = load_peft_weights(os.fspath(folder), device="cpu")
    missing, unexpected = sorted(keys.keys() - found.keys()), sorted(found.keys() - keys.keys())
    if missing or unexpected:
        raise ValueError(
            f"{os.fspath(folder)}: weights of another adapter: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}. Nothing was changed. Load them with the adapter's own configuration: "
            "peft.PeftModel.from_pretrained(base, folder), before the model is sharded."
        )
    load_full_state_dict(model, {keys[key]: value for key, value in found.items()}, strict=False)


def mark_adapters(model: PeftModel) -> None:
    """Make `model.save_pretrained` of a sharded model write the adapter alone, when all ranks call it.

    Merging, adding or loading adapters then works or raises an error that says what to do.

    Args:
        model: a prepared model with adapters.
    """
    model.save_pretrained = _Method(model, "save_pretrained", _save)
    for name in _MERGING:
        setattr(model, name, _Method(model, name, _merge))
    for name in _CHANGING:
        setattr(model, name, _Method(model, name, _refuse_change))


class _Method:
    """Stands in for a method of a sharded model; on a copy, which is an ordinary model, for itself."""

    def __init__(self, model: PeftModel | None, name: str, body: Any, sharded: bool = True) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._name = name
        self._body = body
        self._sharded = sharded

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        model = self._model()
        return _Method(memo.get(id(model), model), self._name, self._body, sharded=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise zero_ext_bug(f"{self._name} of a deleted model was called")
        own = getattr(type(model), self._name, None)
        plain = partial(own, model) if own is not None else getattr(model.base_model, self._name)
        return (
            self._body(model, self._name, plain, *args, **kwargs) if self._sharded else plain(*args, **kwargs)
        )


def _save(model: PeftModel, name: str, plain: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    # PEFT computes some values, as of prompts, on all ranks, whichever of them writes.
    if args or kwargs.get("state_dict") is not None or another_rank_saves(kwargs):
        plain(save_directory, *args, **kwargs)
        return
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        raise ValueError(
            "path_initial_model_for_weight_conversion: expected None, got a path: it loads another "
            "adapter, which "
            "a sharded model cannot. Save without it, and convert with the plain model."
        )
    engine = engine_of(model)
    embeddings = kwargs.get("save_embedding_layers", "auto")
    state = adapter_state_dict(model, save_embedding_layers=embeddings)
    writes = kwargs.pop("is_main_process", True) and engine.rank == 0

    def write() -> None:
        if writes:
            plain(save_directory, state_dict=state, **kwargs)

    raise_on_all_ranks(
        engine.collectives, write, f"writing the adapter to {save_directory}", "Nothing was changed."
    )


def _merge(model: PeftModel, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    if any(is_packed(parameter) for parameter in model.parameters()):
        raise RuntimeError(
            f"{name}(): quantized weights would be replaced, and their shards would stay as they are. Save "
            "the adapter (model.save_pretrained), load it onto the plain base model with "
            "PeftModel.from_pretrained, and merge there."
        )
    engine = engine_of(model)
    if any(unit.state is not UnitState.GATHERED for unit in engine.units):
        raise RuntimeError(
            f"{name}(): the base model is sharded over the ranks. Call it on all ranks inside 'with "
            "zero_ext.gathered(model, modifier_rank=0):' and save the result there, or save the adapter "
            "and merge it into the plain base model."
        )
    result = plain(*args, **kwargs)
    with torch.no_grad():
        for parameter, (unit, number) in engine.index.items():
            # Some methods write into a weight, others give it new data, which its shard would not see.
            if parameter.data_ptr() != unit.view_of(number).data_ptr():
                parameter.data = unit.view_of(number).copy_(parameter.data)
    return result


def _refuse_change(model: PeftModel, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"{name}(): it would add or remove parameters of a sharded model. Make all adapters before "
        "prepare. Load "
        "weights of an adapter with zero_ext.integrations.peft.load_adapter_weights(model, folder)."
    )


def _stored_keys(
    model: PeftModel, adapters: Collection[str], save_embedding_layers: bool | str
) -> dict[str, str]:
    """Return the model's own keys of the state that PEFT saves for ``adapters``, by the keys it stores them
    under.

    PEFT itself names them, from a state dict of empty tensors.
    """
    engine = engine_of(model)
    names = [engine.full_tensors.name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    stubs = {name: torch.empty(0, device="cpu") for name in (*names, *persistent_buffers(model))}
    by_stub = {id(stub): name for name, stub in stubs.items()}
    found: dict[str, str] = {}
    for adapter in adapters:
        chosen = get_peft_model_state_dict(
            model, stubs, adapter_name=adapter, save_embedding_layers=save_embedding_layers
        )
        unknown = [key for key, stub in chosen.items() if id(stub) not in by_stub]
        if unknown:
            raise ValueError(
                f"adapter '{adapter}' of type {model.peft_config[adapter].peft_type}: PEFT computes "
                f"'{unknown[0]}' from full weights when it saves. Save inside 'with "
                "zero_ext.gathered(model):', with state_dict=model.state_dict()."
            )
        found |= {key: by_stub[id(stub)] for key, stub in chosen.items()}
    return found
