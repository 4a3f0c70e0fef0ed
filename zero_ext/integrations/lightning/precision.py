"""Lightning's precision names on the engine: compute dtype, autocast, loss scale, clipping."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities import apply_to_collection
from torch import nn

from zero_ext.zero.api.engine_lookup import engine_of

# Lightning's names, and the dtype of parameters that each asks for; the Trainer's default asks for none.
_DTYPES = {"32-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ZeroPrecision(Precision):
    """A precision plugin for a sharded model.

    Parameters are in the compute dtype with fp32 master weights, in "mixed" and "true" alike. "mixed" runs
    the steps under autocast, "true" converts batches. The engine scales the loss of fp16 and unscales in its
    step.

    Args:
        given: the plugin that Lightning made of ``Trainer(precision=...)``.

    Raises:
        ValueError: a precision, or a plugin of the user's own, that sharded training cannot serve.
    """

    def __init__(self, plugin: Precision) -> None:
        if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in _DTYPES:
            raise ValueError(
                f"precision: expected one of {', '.join(map(repr, _DTYPES))}, got {plugin.precision!r} "
                f"({type(plugin).__name__}). Pass one of them to Trainer(precision=...)."
            )
        self._plugin = plugin
        self.precision: Any = plugin.precision
        self.dtype = _DTYPES[plugin.precision]
        self._inputs: torch.dtype | None = None

    def computes_in(self, dtype: str) -> None:
        """Set the configuration's ``precision.dtype``, to which batches without autocast are converted."""
        self._inputs = _TORCH.get(dtype) if not isinstance(self._plugin, MixedPrecision) else None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Left to the engine, which converts a unit at a time."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the floating-point tensors of a batch in compute precision, unless under autocast."""
        if self._inputs is None:
            return data
        return apply_to_collection(data, torch.Tensor, _to, self._inputs)

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast, or the default dtype, of a step."""
        return self._plugin.forward_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Set the default dtype while ``configure_model`` runs."""
        return self._plugin.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the same."""
        return self._plugin.module_init_context()

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:
        """Scales the loss of fp16, before the hooks see it."""
        return super().pre_backward(engine_of(module).scale_loss(tensor), module)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips by the true global norm; left to the step where the configuration says the same.

        Raises ``ValueError`` for clipping by value: no rank holds the gradients.
        """
        engine = optimizer.engine
        if clip_val <= 0 or clip_val == engine.config.gradient_clipping:
            return
        if gradient_clip_algorithm is not GradClipAlgorithmType.NORM:
            raise ValueError(
                "gradient_clip_algorithm: expected 'norm', got 'value': no rank has the full gradients. "
                "Use 'norm'."
            )
        engine.clip_grad_norm_(float(clip_val))


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
