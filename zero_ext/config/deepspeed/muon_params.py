"""DeepSpeed's params of its Muon to those of ``zero_ext.Muon``."""

from __future__ import annotations

from typing import Any

from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import SUGGESTIONS, show, unknown_key, wrong_value

from .deepspeed_keys import FLAG, ResolvedKeys, ValueType, choice, number

_RATE = number(0)
_BETAS = ValueType(
    "a list of 2 numbers in [0, 1)",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(is_number(each) and 0 <= each < 1 for each in value)
    ),
)
# Type and native keys, in the order in which they are set: the rates of one rule come after that of both.
_SETTINGS: dict[str, tuple[ValueType, tuple[str, ...]]] = {
    "lr": (_RATE, ("lr", "adamw.lr")),
    "muon_lr": (_RATE, ("lr",)),
    "adam_lr": (_RATE, ("adamw.lr",)),
    "momentum": (_RATE, ("momentum",)),
    "weight_decay": (_RATE, ("weight_decay", "adamw.weight_decay")),
    "betas": (_BETAS, ("adamw.betas",)),
    "eps": (_RATE, ("adamw.eps",)),
}
_DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "adamw.lr": 3e-4,
    "adamw.betas": [0.9, 0.95],
    "adamw.eps": 1e-10,
    "adamw.weight_decay": 0.0,
}
# Of the parameters' names, in lower case: `deepspeed.initialize` gives those parameters to Adam.
_ADAMW_NAMES = ["embed", "lm_head"]
_NS_METHOD = "ns_method"
# By ns_method. "gram" is the same polynomial, which DeepSpeed evaluates in fp16 or fp32.
_NS_DTYPES = {"gram": "fp32", "standard": "bf16"}
# Type, the value that is served, why there is no other; or the reason for which none has an effect.
_FIXED: dict[str, tuple[bool, str]] = {
    "adam_w_mode": (True, "Weight decay is decoupled here. Remove it"),
    "fp32_optimizer_states": (True, "Write bf16.bf16_optimizer_states true for state in bf16"),
    "per_head_muon": (False, "Each matrix is orthogonalized as one, not head by head. Remove it"),
}
_NO_EFFECT = ("torch_adam", "foreach")
_CLIPPED_BEFORE = (
    "gradients are clipped before Muon averages them. In stages 1 to 3 DeepSpeed clips Muon's updates "
    "instead, and their norm grows with the matrices. Write 0 for none"
)


def translate_muon(settings: dict[str, Any], resolved: ResolvedKeys) -> dict[str, Any]:
    """Return the native params for ``settings``, with notes and problems in ``resolved``."""
    known = (*_SETTINGS, *_FIXED, *_NO_EFFECT, _NS_METHOD)
    flat = dict(_DEFAULTS)
    for name in settings:
        if name not in (*known, "max_grad_norm"):
            suggests = len(resolved.problems) < SUGGESTIONS
            resolved.problems.append(unknown_key(_path(name), map(_path, known), suggests))
    for name, (value_type, natives) in _SETTINGS.items():
        if name not in settings:
            continue
        if not value_type.fits(settings[name]):
            resolved.add_problem(_path(name), wrong_value(value_type.words, settings[name]))
        flat.update(dict.fromkeys(natives, settings[name]))
    for name, (wanted, why) in _FIXED.items():
        value = settings.get(name, wanted)
        if value is not wanted:
            expected = FLAG.words if not isinstance(value, bool) else str(wanted).lower()
            resolved.add_problem(_path(name), f"expected {expected}, got {show(value)}. {why}.")
    for name in _NO_EFFECT:
        if name in settings:
            resolved.note(_path(name), "there is one implementation of AdamW")
    method = settings.get(_NS_METHOD, "standard")
    if method not in tuple(_NS_DTYPES):
        resolved.add_problem(_path(_NS_METHOD), wrong_value(choice(*_NS_DTYPES).words, method))
    else:
        flat["ns_dtype"] = _NS_DTYPES[method]
    if resolved.stage and resolved.values.get("gradient_clipping") != 0:
        resolved.note("gradient_clipping", _CLIPPED_BEFORE, "difference")
    own = {name: value for name, value in flat.items() if "." not in name}
    adamw = {name.partition(".")[2]: value for name, value in flat.items() if "." in name}
    return {**own, "adamw": adamw, "adamw_names": list(_ADAMW_NAMES)}


def _path(name: str) -> str:
    return f"optimizer.params.{name}"
