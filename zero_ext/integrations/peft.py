"""PEFT's adapters over a sharded base model: LoRA and QLoRA under ZeRO-3, adapter-only saves, a Trainer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from peft import PeftModel
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
except ImportError as error:
    raise ImportError(
        f"zero_ext.integrations.peft: the package '{error.name}' is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install peft."
    ) from error

from transformers import Trainer

from zero_ext.config import ZeroConfig
from zero_ext.integrations.prepare_with_features import prepare as prepare_plain
from zero_ext.integrations.transformers.model_patches import BoundMethod, another_rank_saves, is_prepared
from zero_ext.integrations.transformers.trainer import ZeroTrainerMixin
from zero_ext.integrations.transformers.trainer_checkpoints import (
    STATE_FOLDER,
    TRAINER_STATE,
    stored_parameters,
)
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import full_state_dict, load_full_state_dict
from zero_ext.zero.construction.module_tensors import persistent_buffers
from zero_ext.zero.memory.gathered_unit import UnitState
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.parameter_marks import is_packed

__all__ = [
    "ZeroPeftTrainer",
    "ZeroPeftTrainerMixin",
    "adapter_state_dict",
    "load_adapter_weights",
    "mark_adapters",
    "prepare",
]

_MERGING = ("merge_and_unload", "merge_adapter", "unmerge_adapter", "unload")
_CHANGING = ("add_adapter", "load_adapter", "delete_adapter", "add_weighted_adapter")


def prepare(
    model: PeftModel,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> tuple[PeftModel, Any]:
    """Prepare a model that `peft.get_peft_model` made, as `zero_ext.prepare`; a collective of all ranks.

    The base model, quantized or not, is sharded and stored in its tier without gradients and optimizer state,
    and adapters train. `model.save_pretrained` then gathers and writes the adapter alone, and what would
    break the link between parameters and their shards says what to do instead.

    Args:
        model: the model with adapters.
        optimizer: as for [`prepare`][zero_ext.prepare].
        config: as for `prepare`.
        **settings: as for `prepare`, but for `wrap`.

    Returns:
        The same `model` and the prepared optimizer.

    Raises:
        TypeError: the model has no adapters. Else as `prepare`.
    """
    if not isinstance(model, PeftModel):
        raise TypeError(
            f"model: expected a peft.PeftModel, got {type(model).__name__}. Call peft.get_peft_model(model, "
            "config) first, or zero_ext.prepare for a model without adapters."
        )
    keep_packing(model)
    _, prepared = prepare_plain(model, optimizer, config, wrap=False, **settings)
    mark_adapters(model)
    return model, prepared


def keep_packing(model: nn.Module) -> None:
    """Has bitsandbytes' 4-bit layers keep the order of their bytes.

    On processors with AVX512-BF16 they put weights into another one in their first evaluation, which would
    replace sharded parameters; layers where it happened are put back.
    """
    module: Any  # bitsandbytes' layers say what they are by attributes
    for module in model.modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()  # bitsandbytes puts the bytes back before it hands them out
            module.quant_state = module.weight.quant_state


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
    model.save_pretrained = BoundMethod(model, "save_pretrained", _save)
    for name in _MERGING:
        setattr(model, name, BoundMethod(model, name, _merge))
    for name in _CHANGING:
        setattr(model, name, BoundMethod(model, name, _refuse_change))


def _save(model: PeftModel, name: str, plain: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    # PEFT computes some values, as of prompts, on all ranks, whichever of them writes.
    if args or kwargs.get("state_dict") is not None or another_rank_saves(kwargs):
        plain(save_directory, *args, **kwargs)
        return
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        raise ValueError(
            "path_initial_model_for_weight_conversion: expected None, got a path: it loads another adapter, "
            "which a sharded model cannot. Save without it, and convert with the plain model."
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
        f"{name}(): it would add or remove parameters of a sharded model. Make all adapters before prepare. "
        "Load weights of an adapter with zero_ext.integrations.peft.load_adapter_weights(model, folder)."
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


class ZeroPeftTrainerMixin(ZeroTrainerMixin):
    """`ZeroTrainerMixin` for models with PEFT's adapters, and unchanged for models without.

    The base model, quantized by bitsandbytes or not, is sharded frozen. Checkpoints hold the adapter as PEFT
    writes it and the adapters' optimizer. The base model is in none of them, and resuming expects it as it
    was.
    """

    @property
    def _adapters(self) -> PeftModel | None:
        return self.model if isinstance(self.model, PeftModel) else None

    def _check_adapters(self) -> None:
        """Accept adapters of PEFT; those that transformers' own ``add_adapter`` makes are not served."""
        if self._adapters is None:
            super()._check_adapters()

    def _prepare(self, model: nn.Module, optimizer: Any) -> Any:
        keep_packing(model)
        return super()._prepare(model, optimizer)

    def _finish_sharding(self) -> None:
        keep_packing(self.model)  # also of one that was prepared elsewhere
        if self._adapters is not None:
            mark_adapters(self._adapters)
        super()._finish_sharding()

    @property
    def _includes_frozen(self) -> bool:
        return self._adapters is None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self._adapters is not None and is_prepared(self.model):
            state_dict = adapter_state_dict(self._adapters)
        super()._save(output_dir, state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._adapters is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _check_resume(resume_from_checkpoint, self._adapters)

    def _load_weights(self, folder: str) -> None:
        if self._adapters is None:
            super()._load_weights(folder)
        else:
            load_adapter_weights(self._adapters, folder)


class ZeroPeftTrainer(ZeroPeftTrainerMixin, Trainer):
    """`transformers.Trainer` on adapters over a sharded model.

    It takes what the Trainer takes, and `zero_config`, as
    [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin].
    """


def _check_resume(folder: str, model: PeftModel) -> None:
    """Refuse a folder that is no whole checkpoint of these adapters, before anything changes: ``ValueError``
    names what differs, ``CheckpointError`` reports damage."""
    path = Path(folder)
    for name, meaning in ((TRAINER_STATE, "a Trainer"), ("adapter_config.json", "a model with adapters")):
        if not (path / name).is_file():
            raise ValueError(
                f"{folder}: expected a complete checkpoint of {meaning}, got no {name}. Resume from "
                "another one."
            )
    if not (path / STATE_FOLDER).is_dir():
        return
    parameters = stored_parameters(path / STATE_FOLDER)
    stored = {name: shape for names, shape in parameters.items() for name in names}
    trained = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    problems = [
        f"'{name}' is {stored.get(name, 'missing')} there and {shape} in the model"
        for name, shape in trained.items()
        if stored.get(name) != shape
    ]
    problems += [f"'{name}' is not trained here" for name, *_ in parameters if name not in trained]
    if problems:
        raise ValueError(
            f"{folder}: is a checkpoint of other adapters: {', '.join(problems[:5])}. Nothing was changed. "
            "Resume with the peft_config that was trained there."
        )
