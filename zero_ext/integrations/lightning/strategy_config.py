"""Configuration and precision of Lightning's strategies, held against Lightning's own arguments."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins import precision as fabric_precision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities import apply_to_collection
from torch import nn
from torchmetrics import Metric

from zero_ext.config import ConfigError, Note, ZeroConfig
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.deepspeed.deepspeed_keys import LEFT_OUT
from zero_ext.config.sources.config_source import ConfigSource, WrittenConfig, log_notes, read_config
from zero_ext.integrations.prepare_with_features import keys_set_elsewhere, prepare, written_value
from zero_ext.zero.api.engine_lookup import engine_of

_OWN = "the strategy's arguments stage and config"
_BOTH = "the strategy's config and Lightning's arguments"
_AGREE = "Make them agree, or leave one out."
# Keys of the configuration that Lightning applies itself, and where to set them instead.
_LIGHTNINGS = {
    "optimizer": "configure_optimizers makes the optimizer, or fabric.setup is given it",
    "scheduler": "configure_optimizers makes the schedulers, or fabric.setup is given them",
    "checkpoint.keep_last": "Lightning counts its own checkpoints: ModelCheckpoint(save_top_k=...)",
    "checkpoint.async_save": "Lightning uses a checkpoint, or removes older ones, as soon as a save returns",
}
# Keys that may be "auto", since the Trainer and its loaders have the values.
_FROM_TRAINER = (
    *("batch.micro_batch_size", "batch.gradient_accumulation_steps", "batch.train_batch_size"),
    "gradient_clipping",
)
# Lightning's names, and the dtype of parameters that each asks for; the Trainer's default asks for none.
_DTYPES = {"32-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}
_MIXED = (MixedPrecision, fabric_precision.MixedPrecision)
_PLUGINS = (
    *(Precision, HalfPrecision, fabric_precision.Precision, fabric_precision.HalfPrecision),
    *_MIXED,
)
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def own_settings(
    stage: int | None, written: WrittenConfig, dtype: str | None = None
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    """Return what the strategy's own arguments say, stage 3 by default, and notes on DeepSpeed's keys.

    ``dtype`` is what Lightning's argument ``precision`` asks for.

    Raises ``ConfigError`` if ``stage`` and the configuration's differ, or for keys of what Lightning does.
    """
    resolve = {**dict.fromkeys(_FROM_TRAINER, LEFT_OUT), "precision.dtype": dtype or "keep"}
    config, notes = written.with_dtype(dtype).resolved(resolve)
    problems = keys_set_elsewhere(config, _LIGHTNINGS)
    said = written_value(config, "stage")
    if "stage" in written.overrides:
        stage = None  # the environment changes what a program says
    if stage is not None and said is not None and said != stage:
        problems.append(Problem("stage", f"config has {show(said)}, stage={show(stage)} was given. {_AGREE}"))
    if problems:
        raise ConfigError(problems, _OWN)
    return (config if stage is None else config.replace(stage=stage)), notes


def with_dtype(config: ZeroConfig, precision: str, dtype: str | None) -> ZeroConfig:
    """``config`` in the ``dtype`` that Lightning's ``precision`` asks for, None if it asks for nothing.

    Raises ``ConfigError`` if the configuration asks for another one.
    """
    said = written_value(config, "precision.dtype")
    if dtype is None:
        return config
    if said is not None and said != dtype:
        text = f"config has {show(said)}, precision={precision!r} means {dtype!r}. {_AGREE}"
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


class EnginePrecision(fabric_precision.Precision):
    """A precision plugin for a sharded model.

    Parameters are in the compute dtype with fp32 master weights, in "mixed" and "true" alike. "mixed" runs
    the steps under autocast, "true" converts batches. The engine scales the loss of fp16 and unscales in its
    step.

    ``plugin`` is what Lightning made of ``precision=...``. Raises ``ValueError`` for a precision, or a plugin
    of the user's own, that sharded training cannot serve.
    """

    def __init__(self, plugin: fabric_precision.Precision) -> None:
        if type(plugin) not in _PLUGINS or plugin.precision not in _DTYPES:
            raise ValueError(
                f"precision: expected one of {', '.join(map(repr, _DTYPES))}, got {plugin.precision!r} "
                f"({type(plugin).__name__}). Pass one of them as precision."
            )
        self._plugin = plugin
        self.precision: Any = plugin.precision
        self.dtype = _DTYPES[plugin.precision]
        self._inputs: torch.dtype | None = None

    def computes_in(self, dtype: str) -> None:
        """Set the configuration's ``precision.dtype``, to which batches without autocast are converted."""
        self._inputs = _TORCH.get(dtype) if not isinstance(self._plugin, _MIXED) else None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Left to the engine, which converts a unit at a time."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return the floating-point tensors of a batch in compute precision, unless under autocast."""
        return data if self._inputs is None else _converted(data, self._inputs)

    def convert_output(self, data: Any) -> Any:
        """Return what a model returns to Fabric's loop in the default dtype, so that losses are in it."""
        # Parameters of a "32-true" without precision.dtype keep their dtype, and so do outputs.
        unchanged = self._inputs is None and not isinstance(self._plugin, _MIXED)
        return data if unchanged else _converted(data, torch.get_default_dtype())

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast, or the default dtype, of a step."""
        return self._plugin.forward_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Set the default dtype while ``configure_model`` runs."""
        return self._plugin.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the same."""
        return self._plugin.module_init_context()


class ZeroPrecision(EnginePrecision, Precision):
    """An :class:`EnginePrecision` with what the Trainer calls besides."""

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


class ConfiguredStrategy:
    """The base of the strategies, before Lightning's ``DDPStrategy``: configuration, precision and names."""

    def __init__(self, stage: int | None, config: ConfigSource, **arguments: Any) -> None:
        self._stage, self._written = stage, read_config(config)
        settings, notes = own_settings(stage, self._written)
        log_notes(notes)
        timeout = datetime.timedelta(seconds=settings.timeout_seconds)
        super().__init__(timeout=timeout, **arguments)  # type: ignore[call-arg]  # Lightning's class

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class as "zero_ext" and as "zero_ext_stage_1", "_2" and "_3".

        Args:
            strategy_registry: Lightning's registry of the Trainer or of Fabric.
        """
        for name, arguments in (("", {}), *((f"_stage_{stage}", {"stage": stage}) for stage in (1, 2, 3))):
            strategy_registry.register(f"zero_ext{name}", cls, cls.__name__, override=True, **arguments)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Raise: all ranks write their shards themselves.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"checkpoint_io: {type(self).__name__} has none, because all ranks write their own shards. Use "
            "trainer.save_checkpoint or fabric.save."
        )

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        raise ValueError(
            f"checkpoint_io: expected none, got {type(plugin).__name__}: {type(self).__name__} writes its "
            "checkpoints itself. Remove it from the plugins."
        )

    def _plugin_of(self, kind: Callable[[Any], Any], plugin: Any) -> Any:
        """Return ``plugin`` as a ``kind`` of :class:`EnginePrecision` that agrees with the configuration."""
        made = plugin if isinstance(plugin, EnginePrecision) else kind(plugin or Precision())
        made.computes_in(self._in_precision_of(made).precision.dtype)
        return made

    def _in_precision_of(self, plugin: EnginePrecision) -> ZeroConfig:
        settings, _ = own_settings(self._stage, self._written, plugin.dtype)
        return with_dtype(settings, plugin.precision, plugin.dtype)


def shard(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig, device: torch.device
) -> Any:
    """Shard ``module`` in place, with its metrics on ``device``, and return the prepared optimizer.

    On the meta device it is to be loaded, and has no values to broadcast.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.to(device)  # their states are no buffers, which prepare moves
    empty = any(parameter.is_meta for parameter in module.parameters())
    _, prepared = prepare(
        module, optimizer, config, wrap=False, device=device, init="skip" if empty else "broadcast"
    )
    return prepared


def _converted(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(
        data, torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
