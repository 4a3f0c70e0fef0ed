"""Weights of a sharded model with PEFT's adapters merged, a layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from zero_ext.config.config_errors import clause_of
from zero_ext.zero.api.full_parameters import first_buffers, full_sources, full_values
from zero_ext.zero.api.gathered import gathered
from zero_ext.zero.construction.module_tensors import persistent_buffers
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.dtensor_local import is_split
from zero_ext.zero.units.parameter_marks import is_packed

_BASE = "base_model.model."
_UNLOAD = "unload_and_optionally_merge_module"


def merged_values(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the tensors of ``engine.model`` after PEFT's ``merge_and_unload``, which leaves
    the model as it is; a collective. Each tensor is valid until the next one.

    Raises ``TypeError`` for a model without adapters, and ``ValueError`` for adapters that PEFT cannot merge,
    or cannot merge one layer at a time.
    """
    model: Any = engine.model
    if not isinstance(model, PeftModel):
        raise TypeError(
            f"stream_weights: merge_adapters: expected a peft.PeftModel, got {type(model).__name__}. Leave "
            "it out."
        )
    if not isinstance(model.base_model, BaseTuner):
        raise ValueError(
            f"stream_weights: merge_adapters: expected adapters inside layers, got {model.peft_type}. Leave "
            "it out."
        )
    model.base_model._check_merge_allowed()
    layers = _adapted_layers(model)
    return _merged_values(engine, layers, _largest(engine, layers))


def _adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that PEFT put in the place of the model's own, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        replaces = hasattr(module, _UNLOAD) or hasattr(module, "base_layer")
        if replaces and name.startswith(_BASE) and _layer_of(name, found) is None:
            found[name] = module
    return found


def _layer_of(name: str, layers: dict[str, nn.Module]) -> str | None:
    """Return the name of the one of ``layers`` that has the tensor or module ``name``."""
    parts = name.split(".")
    prefixes = (".".join(parts[:number]) for number in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in layers), None)


def _largest(engine: Engine, layers: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Return the largest parameter of each of ``layers``, or raise ``ValueError`` for those that cannot be
    merged one at a time."""
    users: dict[nn.Parameter, str] = {}
    largest: dict[str, nn.Parameter] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        layer = _layer_of(name, layers)
        if layer is not None and name.startswith(f"{layer}.original_module."):
            continue  # an adapter's base, which has another name too, or not in use
        user = layer or name
        other = users.setdefault(parameter, user)
        if other != user and (layer is not None or other in layers):
            raise _unmergeable(name, f"weights that '{other}' uses too")
        if layer is None:
            continue
        if is_packed(parameter):
            raise _unmergeable(name, "quantized weights")
        if is_split(parameter) or engine.full_tensors.tile_slice(name) is not None:
            raise _unmergeable(name, "a slice of the layer")
        if (
            any(getattr(layers[layer], "lora_bias", {}).values())
            and layers[layer].get_submodule("base_layer").bias is None
        ):
            raise _unmergeable(name, "an adapter with a bias on a layer without")
        largest[layer] = max(largest.get(layer, parameter), parameter, key=nn.Parameter.numel)
    return {parameter: layer for layer, parameter in largest.items()}


def _unmergeable(name: str, got: str) -> ValueError:
    return ValueError(
        f"stream_weights: merge_adapters: '{name}': expected the weights of one layer, got {got}. Save the "
        "adapter, and merge it into the plain model."
    )


def _merged_values(
    engine: Engine, layers: dict[str, nn.Module], largest: dict[nn.Parameter, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    # A layer is merged while the unit of its base is gathered anyway. Adapters by themselves are left out.
    sources = [(source, _own_names(source.names, layers)) for source in full_sources(engine)]
    chosen = [(source, names) for source, names in sources if names or source.parameters[0] in largest]
    values = full_values(engine, [source for source, _ in chosen])
    for (source, names), value in zip(chosen, values, strict=True):
        for name in names[:1]:
            yield name, value
        layer = largest.get(source.parameters[0])
        if layer is not None:
            yield from _merged(layer.removeprefix(_BASE), layers[layer])
    for name, buffer in first_buffers(engine.model).items():
        for own in _own_names([name], layers):
            yield own, buffer.detach()


def _own_names(names: Iterable[str], layers: dict[str, nn.Module]) -> list[str]:
    """Return those of ``names`` that the model without adapters has too, as they are there."""
    outside = [name for name in names if name.startswith(_BASE) and _layer_of(name, layers) is None]
    return [name.removeprefix(_BASE) for name in outside]


def _merged(name: str, layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Merging writes to weights of the base, and at times of the adapter, so it gets a copy of the layer.
    with gathered(layer.parameters()), torch.no_grad():
        twin: Any = copy.deepcopy(layer)
        try:
            if hasattr(twin, _UNLOAD):
                plain = getattr(twin, _UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
            else:
                twin.merge()
                plain = twin.get_base_layer()
        except (RuntimeError, NotImplementedError) as error:
            raise _unmergeable(
                name, f"an adapter that PEFT does not merge: {clause_of(str(error))}"
            ) from error
    for key, tensor in (*plain.named_parameters(), *persistent_buffers(plain).items()):
        yield f"{name}.{key}", tensor.detach()
