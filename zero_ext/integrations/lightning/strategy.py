"""``ZeroStrategy``: Lightning's loops around a LightningModule that is sharded in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from zero_ext.config import ZeroConfig
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.sources.config_source import ConfigSource
from zero_ext.integrations.lightning import lightning_checkpoints
from zero_ext.integrations.lightning.strategy_config import (
    ConfiguredStrategy,
    ZeroPrecision,
    completed,
    shard,
)
from zero_ext.zero.api.engine_lookup import MODULE_ATTRIBUTE, engine_of
from zero_ext.zero.construction.sharded_init import Init
from zero_ext.zero.engine import Engine


class ZeroStrategy(ConfiguredStrategy, DDPStrategy):
    """ZeRO under Lightning's Trainer: `Trainer(strategy=ZeroStrategy(stage=3), devices=8)`.

    The LightningModule keeps its class and is sharded in place before training or evaluation begins. What
    `configure_model` builds is initialized sharded. Processes, devices and samplers are those of
    Lightning's `DDPStrategy`. A checkpoint is a folder, written by all ranks and read at any number of
    them, without pickle.

    Args:
        stage: ZeRO stage; default the configuration's, else 3.
        config: as for [`load_config`][zero_ext.load_config]. Batch sizes, clipping and precision may be
            "auto".
        accelerator: as in `DDPStrategy`.
        parallel_devices: as in `DDPStrategy`.
        cluster_environment: as in `DDPStrategy`.
        precision_plugin: as in `DDPStrategy`, one of Lightning's own for fp32, bf16 or fp16.
        process_group_backend: as in `DDPStrategy`.

    Raises:
        ConfigError: a wrong key or value; `stage`, `config` and the Trainer's arguments contradict each
            other (here or when the Trainer starts; both sides are shown).
        ValueError: a precision that is not supported.
    """

    strategy_name = "zero_ext"

    def __init__(
        self,
        stage: int | None = None,
        config: ConfigSource = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            stage,
            config,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
        )

    @property
    def config(self) -> ZeroConfig:
        """The configuration in force: the strategy's own, completed from the Trainer's arguments."""
        settings = self._in_precision_of(self.precision_plugin)
        module = self.lightning_module
        return settings if module is None else completed(settings, module.trainer, module)

    # -- what Lightning hands over ------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> ZeroPrecision:
        """The engine's precision plugin."""
        return self._zero_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin, self._zero_precision = plugin, self._plugin_of(ZeroPrecision, plugin)

    # -- sharding -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Initialize modules sharded, around `configure_model`.

        Yields:
            Nothing.
        """
        with Init(self.config):
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, with its optimizer if it is to be trained.

        Every fit shards it anew, since Lightning makes new optimizers for it. Evaluation takes a sharded
        module as it is.

        Args:
            trainer: Lightning's trainer.

        Raises:
            AssertionError: Lightning set no accelerator.
        """
        if self.accelerator is None:
            raise zero_ext_bug("Lightning called setup without an accelerator")
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._is_sharded and not fitting:
            return
        if fitting:
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self._module)
            self.setup_optimizers(trainer)
        self._shard(fitting)
        self.setup_precision_plugin()

    def _shard(self, fitting: bool) -> None:
        made = self._made_optimizer() if fitting else None
        prepared = shard(self._module, made, self.config, self.root_device)
        if prepared is not None:
            self.optimizers = [prepared]

    def _made_optimizer(self) -> torch.optim.Optimizer:
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], torch.optim.Optimizer):
            names = [type(each).__name__ for each in self.optimizers]
            raise ValueError(
                f"configure_optimizers of {type(self._module).__name__}: expected one torch optimizer, got "
                f"{names}. Put parameters with other settings into param groups of it."
            )
        return self.optimizers[0]

    def model_to_device(self) -> None:
        """Do nothing: the engine moves the model a unit at a time."""

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise zero_ext_bug("no LightningModule is connected")
        return self.lightning_module

    @property
    def _engine(self) -> Engine:
        return engine_of(self._module)

    @property
    def _is_sharded(self) -> bool:
        return vars(self._module).get(MODULE_ATTRIBUTE) is not None

    # -- steps --------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`, as one forward to the engine unless it calls backward itself.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns.
        """
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:
                return self._module.training_step(*args, **kwargs)
            return self._in_one_forward(self._module.training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step`.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns.
        """
        with self.precision_plugin.val_step_context():
            return self._evaluated(self._module.validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step`.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns.
        """
        with self.precision_plugin.test_step_context():
            return self._evaluated(self._module.test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns.
        """
        with self.precision_plugin.predict_step_context():
            return self._evaluated(self._module.predict_step, args, kwargs)

    def _evaluated(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Views of gathered memory made in inference mode could not be used for training afterwards.
        with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
            return self._in_one_forward(step, args, kwargs)

    def _in_one_forward(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the engine looks ahead within a forward, and gathers what the root owns; a step is one."""
        hooks, outputs = self._engine.hooks, None
        hooks.enter(self._module, type(self._module).__name__, (args, kwargs))
        try:
            outputs = step(*args, **kwargs)
        finally:
            hooks.leave(self._module, outputs)
        return outputs

    def on_validation_start(self) -> None:
        """Finish delayed updates, so that evaluation within a fit sees the newest parameters."""
        self._engine.finish_updates()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients local, around all micro-batches of a step but the last.

        Yields:
            Nothing.
        """
        with self._engine.collector.no_sync():
            yield

    # -- checkpoints --------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards are loaded, so there must be some."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the optimizer is loaded with the shards."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: parameters go from their shards into the checkpoint.

        Returns:
            An empty dict.
        """
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing: optimizer state goes from its shards into the checkpoint.

        Args:
            optimizer: the prepared optimizer.

        Returns:
            An empty dict.
        """
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint as the folder `filepath`, in the engine's own format.

        Args:
            checkpoint: Lightning's own part of it.
            filepath: the folder; rank 0's counts.
            storage_options: only None is supported.

        Raises:
            TypeError: `storage_options` is given.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options: expected None, got a value: ZeroStrategy saves to a file system of all "
                "ranks. Leave it out."
            )
        lightning_checkpoints.save(Path(self.broadcast(str(filepath))), self._module, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint folder.

        Args:
            checkpoint_path: the folder; rank 0's counts.
            weights_only: no effect: nothing is pickled.

        Returns:
            Lightning's own part of it.
        """
        training = self._module.trainer.state.fn == TrainerFn.FITTING
        return lightning_checkpoints.load(Path(self.broadcast(str(checkpoint_path))), self._module, training)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` restored the parameters.

        Args:
            checkpoint: Lightning's own part.
            strict: no effect.
        """

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` restored the optimizer.

        Args:
            checkpoint: Lightning's own part.
        """

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; rank 0 does.

        Args:
            filepath: the folder.
        """
        if self.is_global_zero:
            lightning_checkpoints.remove(Path(filepath))

    def teardown(self) -> None:
        """End Lightning's part; the module stays sharded."""
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
