"""Adapters of PEFT that tokens over ranks, in documents or in chunks would make wrong."""

from __future__ import annotations

from torch import nn


def refuse_prompts(model: nn.Module) -> None:
    """Raise ``ValueError`` for adapters that put virtual tokens before rows and drop ``position_ids``.

    Args:
        model: has attention within documents.
    """
    found = _with_setting(model, "is_prompt_learning")
    if found is not None:
        raise ValueError(
            f"{type(found).__name__}: expected adapters that pass position_ids on, as attention is within "
            "documents, got prompts, with which PEFT drops them. Use LoRA, or rows of one document each "
            "without apply_document_attention."
        )


def refuse_activated_adapters(model: nn.Module) -> None:
    """Raise ``ValueError`` for adapters that begin at some token of a row (aLoRA).

    Args:
        model: its sequences are to be sharded.
    """
    found = _with_setting(model, "alora_invocation_tokens")
    if found is not None:
        raise ValueError(
            f"{type(found).__name__}: expected adapters of all tokens, as sequences are over ranks, got some "
            "that begin at a token of the row (alora_invocation_tokens). Use LoRA without it, or full "
            "sequences on every rank."
        )


def is_activated(layer: nn.Module) -> bool:
    """Return whether an adapter of ``layer`` begins at some token of a row (aLoRA)."""
    variants = getattr(layer, "lora_variant", None) or {}
    return any(type(each).__name__.startswith("ALora") for each in variants.values())


def _with_setting(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module with an adapter that has the setting ``name``, if there is one."""
    # PEFT's configurations are in the model itself, so nothing is imported for models without adapters.
    for module in model.modules():
        adapters = getattr(module, "peft_config", None) or {}
        if isinstance(adapters, dict) and any(getattr(each, name, None) for each in adapters.values()):
            return module
    return None
