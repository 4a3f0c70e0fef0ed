"""The Trainer's arguments for a ``ZeroStrategy``: its configuration, held against them, and its precision."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities import apply_to_collection
from torch import nn

from zero_ext.config import ConfigError, Note, ZeroConfig
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.deepspeed.deepspeed_keys import LEFT_OUT
from zero_ext.config.sources.config_source import WrittenConfig
from zero_ext.integrations.prepare_with_features import written_value
from zero_ext.zero.api.engine_lookup import engine_of

_OWN = "ZeroStrategy(stage, config)"
_BOTH = "ZeroStrategy's config and Trainer"
_AGREE = "Make them agree, or leave one out."
# Keys of the configuration that Lightning applies itself, and where to set them instead.
_LIGHTNINGS = {
    "optimizer": "the LightningModule's configure_optimizers makes the optimizer",
    "scheduler": "the LightningModule's configure_optimizers makes the schedulers",
    "checkpoint.keep_last": "Lightning counts its own checkpoints: ModelCheckpoint(save_top_k=...)",
    "checkpoint.async_save": "Lightning removes older checkpoints as soon as a save returns",
}
# Keys that may be "auto", since the Trainer and its loaders have the values.
_FROM_TRAINER = (
    *("batch.micro_batch_size", "batch.gradient_accumulation_steps", "batch.train_batch_size"),
    "gradient_clipping",
)
# Lightning's names, and the dtype of parameters that each asks for; the Trainer's default asks for none.
_DTYPES = {"32-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def own_settings(
    stage: int | None, written: WrittenConfig, dtype: str | None = None
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    """Return what the strategy's own arguments say, stage 3 by default, and notes on DeepSpeed's keys.

    ``dtype`` is what ``Trainer(precision=...)`` asks for.

    Raises ``ConfigError`` if ``stage`` and the configuration's differ, or for keys of what Lightning does.
    """
    resolve = {**dict.fromkeys(_FROM_TRAINER, LEFT_OUT), "precision.dtype": dtype or "keep"}
    config, notes = written.with_dtype(dtype).resolved(resolve)
    problems = [
        Problem(path, f"got {show(written_value(config, path))}: {why}. Remove the key.")
        for path, why in _LIGHTNINGS.items()
        if written_value(config, path) not in (None, False)
    ]
    said = written_value(config, "stage")
    if stage is not None and said is not None and said != stage:
        problems.append(Problem("stage", f"config has {show(said)}, stage={show(stage)} was given. {_AGREE}"))
    if problems:
        raise ConfigError(problems, _OWN)
    return (config if stage is None else config.replace(stage=stage)), notes


def with_dtype(config: ZeroConfig, precision: str, dtype: str | None) -> ZeroConfig:
    """``config`` in the ``dtype`` that ``Trainer(precision=...)`` asks for, None if it asks for nothing.

    Raises ``ConfigError`` if the configuration asks for another one.
    """
    said = written_value(config, "precision.dtype")
    if dtype is None:
        return config
    if said is not None and said != dtype:
        text = f"config has {show(said)}, Trainer(precision={precision!r}) means {dtype!r}. {_AGREE}"
        raise ConfigError(Problem("precision.dtype", text), _BOTH)
    return config.replace(precision=config.precision.replace(dtype=dtype))


def completed(config: ZeroConfig, trainer: Trainer, module: LightningModule) -> ZeroConfig:
    """``config`` with the Trainer's gradient accumulation and clipping.

    Clipping becomes part of the step, unless the module decides about it in ``configure_gradient_clipping``.
    Raises ``ConfigError`` for contradictions, both sides shown, and for clipping by value.
    """
    steps, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    algorithm = trainer.gradient_clip_algorithm
    problems = []
    if clip and algorithm is not None and algorithm.value != "norm":
        text = (
            f"expected Trainer(gradient_clip_algorithm='norm'), got {algorithm.value!r}: no rank has the "
            "full gradients. Use 'norm', the true global norm."
        )
        problems.append(Problem("gradient_clipping", text))
    for path, argument, value, wanted in (
        ("batch.gradient_accumulation_steps", "accumulate_grad_batches", steps, steps),
        ("gradient_clipping", "gradient_clip_val", clip, None if clip is None else float(clip)),
    ):
        said = written_value(config, path)
        if wanted is not None and said is not None and said != wanted:
            problems.append(Problem(path, f"config has {said}, Trainer({argument}={value}). {_AGREE}"))
    if problems:
        raise ConfigError(problems, _BOTH)
    config = config.replace(batch=config.batch.replace(gradient_accumulation_steps=steps))
    if clip is None or is_overridden("configure_gradient_clipping", module):
        return config
    return config.replace(gradient_clipping=float(clip))


class ZeroPrecision(Precision):
    """A precision plugin for a sharded model.

    Parameters are in the compute dtype with fp32 master weights, in "mixed" and "true" alike. "mixed" runs
    the steps under autocast, "true" converts batches. The engine scales the loss of fp16 and unscales in its
    step.

    ``plugin`` is what Lightning made of ``Trainer(precision=...)``. Raises ``ValueError`` for a precision, or
    a plugin of the user's own, that sharded training cannot serve.
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
