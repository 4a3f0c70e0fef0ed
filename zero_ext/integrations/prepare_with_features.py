"""``prepare`` with the sparse attention and the monitors that the configuration asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from zero_ext.config import load_config
from zero_ext.zero.api.prepare import prepare as prepare_alone

PrepareParameters = ParamSpec("PrepareParameters")
Prepared = tuple[Any, Any]


def _completed(prepare: Callable[PrepareParameters, Prepared]) -> Callable[PrepareParameters, Prepared]:
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def call(*args: PrepareParameters.args, **kwargs: PrepareParameters.kwargs) -> Prepared:
        bound = signature.bind(*args, **kwargs)
        settings = bound.arguments["config"] = load_config(bound.arguments.get("config"))
        if settings.sparse_attention is not None:
            from zero_ext.integrations.sparse_attention_setup import apply_sparse_attention

            apply_sparse_attention(bound.arguments["model"], settings.sparse_attention)
        if settings.monitor is None and settings.steps_per_print is None:
            return prepare(*bound.args, **bound.kwargs)
        # Whoever watches nothing imports none of it.
        from zero_ext.monitor.run_monitor import attach, check_packages

        check_packages(settings.monitor)
        model, optimizer = prepare(*bound.args, **bound.kwargs)
        attach(model, settings.monitor, steps_per_print=settings.steps_per_print)
        return model, optimizer

    return call


prepare = _completed(prepare_alone)
