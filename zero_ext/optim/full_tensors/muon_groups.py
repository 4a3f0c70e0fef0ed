"""The param groups of ``zero_ext.Muon``: which parameters Muon steps and which AdamW, and their settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import show
from zero_ext.config.full_tensor_costs import DEFAULT_NS_DTYPE, matrix_sides

ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "maximize": False,
    "decoupled_weight_decay": True,
}
_OWN_KEYS = ("lr", "betas", "eps", "weight_decay")
_RATES = (None, "original", "match_rms_adamw")
_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MUON_KEYS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "adjust_lr_fn")
# Of torch's schedulers, which write them into groups, and a name that is for the user only.
_SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_OTHER_KEYS = ("params", "param_names", "use_muon", "name", *_SCHEDULED)
_FIXED = {"maximize": False, "decoupled_weight_decay": True}


def serves(group: Mapping[str, Any]) -> bool:
    """Return whether Muon steps the parameters of a param group; those of ``torch.optim.Muon`` all."""
    return bool(group.get("use_muon", True))


def ns_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of Newton-Schulz iterations on the matrices of a param group."""
    return _NS_DTYPES[group.get("ns_dtype", DEFAULT_NS_DTYPE)]


def direction_dtype(groups: Iterable[Mapping[str, Any]]) -> torch.dtype:
    """Return the dtype that directions travel in to the owners of matrices: the widest that any of the param
    groups iterates in, which holds the values of all."""
    dtypes = [ns_dtype(group) for group in groups if serves(group)]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=_NS_DTYPES[DEFAULT_NS_DTYPE])


def read_settings(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of param groups, each that is a tensor of one element read as a number."""
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def adamw_settings(adamw: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a group that AdamW steps, with those that the user gave.

    Raises:
        ValueError: `adamw` is no mapping, has other keys than lr, betas, eps and weight_decay, or a value
            out of range.
    """
    if adamw is not None and not isinstance(adamw, Mapping):
        raise ValueError(f"adamw: expected a mapping, got {show(adamw)}. Pass one, or leave it out.")
    chosen = dict(adamw or {})
    for key in chosen:
        if key not in _OWN_KEYS:
            raise ValueError(
                f"adamw.{key}: expected one of {', '.join(_OWN_KEYS)}, got another key. Remove it."
            )
    if isinstance(chosen.get("betas"), list):
        chosen["betas"] = tuple(chosen["betas"])
    group = {**ADAMW, **chosen, "use_muon": False}
    check_settings(group, "adamw.")
    return group


def check_keys(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a key of a param group that ``zero_ext.Muon`` does not have."""
    for key in group:
        if key not in ADAMW and key not in _MUON_KEYS and key not in _OTHER_KEYS:
            known = ", ".join([*_OWN_KEYS, *_MUON_KEYS, "use_muon"])
            raise ValueError(f"{key}: expected one of {known} in a param group, got another key. Remove it.")


def check_rules(groups: Sequence[Mapping[str, Any]], rules: Sequence[bool]) -> None:
    """Raise ``ValueError`` for a changed ``use_muon``, and for settings that are out of range.

    Args:
        groups: param groups.
        rules: whether Muon steps the parameters of each, as it was when the state was made.
    """
    for index, (group, rule) in enumerate(zip(groups, rules, strict=False)):
        if serves(group) != rule:
            raise ValueError(
                f"param_groups[{index}].use_muon: expected {rule} as at construction, got {not rule}. Make a "
                "new optimizer to change it, as state of Muon and of AdamW differs."
            )
        check_settings(group, f"param_groups[{index}].")


def check_settings(group: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ``ValueError``, with ``prefix`` before the setting's name, for one that is out of range."""
    muon = serves(group)
    for name, fixed in _FIXED.items():
        if group.get(name, fixed) is not fixed:
            raise ValueError(f"{prefix}{name}: expected {fixed}, got {show(group[name])}. Remove the key.")
    for name in ("lr", "weight_decay", "eps", *(("momentum",) if muon else ())):
        value = group[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not is_number(value) or value < 0:
            raise ValueError(
                f"{prefix}{name}: expected a finite number of at least 0, got {show(value)}. Pass such a "
                "number."
            )
    if muon and group["momentum"] >= 1:
        raise ValueError(
            f"{prefix}momentum: expected a number below 1, got {show(group['momentum'])}. Pass such a number."
        )
    name, count, top = ("ns_coefficients", 3, math.inf) if muon else ("betas", 2, 1.0)
    values = group[name]
    fits = isinstance(values, list | tuple) and len(values) == count and all(map(is_number, values))
    if not fits or not (muon or all(0 <= each < top for each in values)):
        wanted = "three finite numbers" if muon else "two numbers of at least 0 and below 1"
        raise ValueError(f"{prefix}{name}: expected {wanted}, got {show(values)}. Pass such numbers.")
    if not muon:
        return
    steps = group["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(
            f"{prefix}ns_steps: expected an integer from 0 to 99, got {show(steps)}. Pass such a number."
        )
    for name, known, words in (
        ("ns_dtype", tuple(_NS_DTYPES), "'bf16' or 'fp32'"),
        ("adjust_lr_fn", _RATES, "'original' or 'match_rms_adamw'"),
    ):
        value = group.get(name, known[0])
        if value not in known:
            raise ValueError(f"{prefix}{name}: expected {words}, got {show(value)}. Pass one of them.")


def tensor_of(listed: Any) -> torch.Tensor:
    """Return the parameter of what a list of parameters may hold: a parameter, or its name and itself."""
    parameter: torch.Tensor = listed[1] if isinstance(listed, tuple) else listed
    return parameter


def check_matrices(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ValueError`` for parameters that Muon cannot step: those that are no matrices of real
    numbers."""
    for parameter in parameters:
        shape = tuple(parameter.shape)
        if parameter.dim() < 2 or not parameter.numel():
            raise ValueError(
                f"use_muon: expected matrices with elements, got a parameter of shape {shape}. Set use_muon "
                "to False in its param group or on the parameter, for which AdamW steps it."
            )
        if parameter.is_complex():
            raise ValueError(
                f"use_muon: expected real numbers, got a parameter of {parameter.dtype} of shape {shape}. "
                "Keep it as real numbers with a last axis of 2, and use torch.view_as_complex in forward."
            )


def divide(
    groups: Iterable[Mapping[str, Any]], module: nn.Module | None, adamw_names: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return param groups divided into what Muon steps and what AdamW steps, as the class documents."""
    left_out = {id(each) for each in _left_to_adamw(module, adamw_names)}
    divided = []
    for group in groups:
        if "use_muon" in group:
            divided.append(dict(group))
            continue
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        chosen: dict[bool, list[Any]] = {True: [], False: []}
        for each in params:
            parameter = tensor_of(each)
            # A matrix with one row or column has one singular value: to orthogonalize it is to scale it.
            suits = parameter.dim() >= 2 and parameter.numel() > 0 and matrix_sides(parameter.shape)[0] > 1
            suits = suits and id(parameter) not in left_out
            chosen[bool(getattr(parameter, "use_muon", suits))].append(each)
        divided += [{**group, "params": own, "use_muon": rule} for rule, own in chosen.items() if own]
    return divided


def _left_to_adamw(module: nn.Module | None, names: Sequence[str] | None) -> list[nn.Parameter]:
    listed = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    if names is not None and (module is None or not listed):
        raise ValueError(
            f"adamw_names: expected a list of strings, and module, got {show(names)}. Pass both, or neither."
        )
    if module is None:
        return []
    # Filters in one or three dimensions have the shape of a stack of matrices, which they are not.
    filters = [
        each
        for layer in module.modules()
        if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d | nn.Conv3d | nn.ConvTranspose3d)
        for each in layer.parameters()
    ]
    if names is not None:
        named = module.named_parameters()
        return filters + [each for name, each in named if any(text.lower() in name.lower() for text in names)]
    return filters + [each for layer in _embeddings_and_outputs(module) for each in layer.parameters()]


def _embeddings_and_outputs(module: nn.Module) -> list[nn.Module]:
    """Return the embeddings of a model and its output layers over the vocabulary.

    An output layer is what `get_output_embeddings` of Hugging Face's models returns, and the last `nn.Linear`
    if it has as many outputs as an embedding has rows.
    """
    found: list[nn.Module] = []
    last, rows = None, set()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            found.append(layer)
            rows.add(layer.num_embeddings)
        elif isinstance(layer, nn.Linear):
            last = layer
        outputs = getattr(layer, "get_output_embeddings", None)
        output = outputs() if callable(outputs) else None
        if isinstance(output, nn.Module):
            found.append(output)
    if last is not None and last.out_features in rows:
        found.append(last)
    return found
