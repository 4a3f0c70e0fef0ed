"""``ZeroFabricStrategy``: Fabric's loops around modules that are sharded in place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.config.sources.config_source import ConfigSource
from zero_ext.integrations.lightning import fabric_checkpoints
from zero_ext.integrations.lightning.strategy_config import ConfiguredStrategy, EnginePrecision, shard
from zero_ext.zero.api.engine_lookup import MODULE_ATTRIBUTE, engine_of
from zero_ext.zero.construction.module_tensors import broadcast_buffers
from zero_ext.zero.construction.sharded_init import Init
from zero_ext.zero.engine import Engine


class ZeroFabricStrategy(ConfiguredStrategy, DDPStrategy):
    """ZeRO under Lightning Fabric: `Fabric(strategy=ZeroFabricStrategy(stage=3), devices=8)`.

    `fabric.setup(model, optimizer)` shards the module in place. It keeps its class inside Fabric's wrapper.
    Several models may be set up, each with an optimizer. Processes, devices, samplers and collectives are
    those of Lightning's `DDPStrategy`. A checkpoint of `fabric.save` is a folder, written by all ranks and
    read at any number of them, without pickle.

    Args:
        stage: ZeRO stage; default the configuration's, else 3.
        config: as for [`load_config`][zero_ext.load_config]. Batch sizes, clipping and precision may be
            "auto".
        accelerator: as in `DDPStrategy`.
        parallel_devices: as in `DDPStrategy`.
        cluster_environment: as in `DDPStrategy`.
        precision: as in `DDPStrategy`, one of Lightning's own for fp32, bf16 or fp16.
        process_group_backend: as in `DDPStrategy`.

    Raises:
        ConfigError: a wrong key or value; `stage`, `config` and Fabric's `precision` contradict each other
            (both sides are shown).
        ValueError: a precision that is not supported.
    """

    def __init__(
        self,
        stage: int | None = None,
        config: ConfigSource = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            stage,
            config,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
        )
        self._backward_sync_control = _NoSync()
        # In order, the same on all ranks.
        self._modules = weakref.WeakKeyDictionary[ModuleUnderFabric, None]()

    @property
    def config(self) -> ZeroConfig:
        """The configuration in force: the strategy's own, in Fabric's precision."""
        return self._in_precision_of(self.precision)

    @property
    def precision(self) -> EnginePrecision:
        """The engine's precision plugin."""
        return self._engine_precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._precision, self._engine_precision = plugin, self._plugin_of(EnginePrecision, plugin)

    # -- sharding -----------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Initialize modules sharded, or with `empty_init` on the meta device, to be loaded later.

        Args:
            empty_init: no initial values are needed. They are zero until a checkpoint is loaded.

        Returns:
            The context for constructors.
        """
        return torch.device("meta") if empty_init else Init(self.config)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine moves the model a unit at a time.

        Args:
            module: given to `fabric.setup`.
        """

    def setup_module(self, module: nn.Module) -> ModuleUnderFabric:
        """Wrap a module. It is sharded with its optimizer, or without one by the first use.

        Args:
            module: given to Fabric.

        Returns:
            The wrapper that Fabric calls.
        """
        made = self._wrapped(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            made.shard_alone()  # the optimizer, which Fabric refuses over meta tensors, can then be made
        return made

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard the module with the parameters that `optimizer` has.

        Args:
            optimizer: given to Fabric.

        Returns:
            The prepared optimizer.

        Raises:
            ValueError: it has no parameters, or those of several modules, of none that was set up or of one
                that has an optimizer.
        """
        wanted = {each for group in optimizer.param_groups for each in group["params"]}
        found = [each for each in self._modules if wanted and wanted <= set(each.parameters())]
        if not found:
            raise ValueError(
                "optimizer: expected parameters of one module that was set up, got others. Call "
                "fabric.setup(module, optimizer) with an optimizer of its own for each module."
            )
        free = [each for each in found if not each.has_optimizer]
        if not free:
            raise ValueError(_ONE_OPTIMIZER.format("a second one"))
        return self._shard(free[0], optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard a module with its optimizer.

        Args:
            module: given to Fabric.
            optimizers: one optimizer.
            scheduler: of the optimizer. The prepared one shares its param groups.

        Returns:
            The wrapper that Fabric calls, the prepared optimizer in a list, and `scheduler`.

        Raises:
            ValueError: there are several optimizers.
        """
        if len(optimizers) != 1:
            raise ValueError(_ONE_OPTIMIZER.format(len(optimizers)))
        made = self._wrapped(module)
        return made, [self._shard(made, optimizers[0])], scheduler

    def _wrapped(self, module: nn.Module) -> ModuleUnderFabric:
        made = ModuleUnderFabric(module, lambda wrapper: self._shard(wrapper, None))
        self._modules[made] = None
        return made

    def _shard(self, wrapper: ModuleUnderFabric, optimizer: Any) -> Any:
        made = shard(wrapper.module, optimizer, self.config, self.root_device)
        wrapper.has_optimizer = optimizer is not None
        return made

    # -- steps --------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward, with the loss scale of fp16 applied.

        Args:
            tensor: the loss.
            module: the one with the loss scale to apply; may be None unless several modules have one.
            *args: passed on to `Tensor.backward`.
            **kwargs: passed on to `Tensor.backward`.

        Raises:
            ValueError: several modules scale their losses, and `module` is None.
        """
        scaling = {each for each in ([module] if module is not None else self._modules) if _scales_loss(each)}
        if len(scaling) > 1:
            raise ValueError(
                f"fabric.backward: expected the argument model, as {len(scaling)} models in fp16 have loss "
                "scales of their own, got none. Pass the model that the next step updates."
            )
        for each in scaling:
            tensor = engine_of(each).scale_loss(tensor)
        tensor.backward(*args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale all gradients so that their true global norm is at most `max_norm`; a collective.

        Args:
            module: unused: the optimizer has the engine.
            optimizer: the prepared optimizer.
            max_norm: the largest norm allowed.
            norm_type: 2 or infinity.
            error_if_nonfinite: raise for a norm that is not finite, except in fp16, where the step is then
                skipped.

        Returns:
            The norm before clipping, 0-d float32.

        Raises:
            RuntimeError: the norm is not finite.
        """
        engine: Engine = optimizer.engine
        norm = engine.clip_grad_norm_(float(max_norm), float(norm_type))
        if error_if_nonfinite and not norm.isfinite() and not engine.optimizer_step.scales_loss:
            raise RuntimeError(
                f"fabric.clip_gradients: expected a finite norm, got {norm.item()}. Call "
                "optimizer.zero_grad() and go on without this step, or pass error_if_nonfinite=False."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Raise: no rank has the full gradients.

        Args:
            module: unused.
            optimizer: unused.
            clip_val: unused.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"fabric.clip_gradients: expected max_norm, got clip_val={clip_val}: no rank has the full "
            "gradients. Use max_norm, the true global norm."
        )

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, their optimizers and other state as the folder `path`.

        Args:
            path: the folder; rank 0's counts. An older one is replaced once this one is complete.
            state: by name: at least one model that was set up, and optimizers, objects with `state_dict`,
                numbers, text, bytes, lists, tuples, dicts and tensors up to 16 MiB.
            storage_options: only None is supported.
            filter: by name of a model or of a dict, which of its entries are saved. A model is then saved
                without its optimizer.

        Raises:
            ValueError: there is no model, a name cannot be a folder's, or an optimizer comes without its
                model or is filtered.
            TypeError: `storage_options` is given, or a value cannot be stored.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options: expected None, got a value: ZeroFabricStrategy saves to a file system of "
                "all ranks. Leave it out."
            )
        folder = Path(self.broadcast(str(path)))
        models = _sharded_modules(state)
        fabric_checkpoints.save(folder, state, models, filter or {}, self.is_global_zero, self.barrier)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a folder of `save_checkpoint` into `state`, or weights of other formats into a single module.

        Args:
            path: the folder; rank 0's counts. With a module as `state`: as for
                [`load_weights`][zero_ext.integrations.load_weights].
            state: by name: models and optimizers that were set up, objects with `load_state_dict`, and values
                that are replaced. Or a module alone (`fabric.load_raw`).
            strict: raise for names that were not saved. Of models without an optimizer in `state` also for
                parameters.
            weights_only: no effect: nothing is pickled.

        Returns:
            The rest of what was saved besides models and optimizers.

        Raises:
            ValueError: names or parameters do not fit, or an optimizer comes without its model.
            CheckpointError: the checkpoint is missing or damaged.
        """
        folder = Path(self.broadcast(str(path)))
        if isinstance(state, ModuleUnderFabric):
            state.shard_alone()
            fabric_checkpoints.load_weights(state.module, folder, strict=strict)
            return {}
        if isinstance(state, nn.Module | torch.optim.Optimizer):
            raise ValueError(
                f"fabric.load_raw: expected a module that was set up, got {type(state).__name__}. Load a "
                "module's weights, or an optimizer together with its module by fabric.load."
            )
        state = state or {}
        return fabric_checkpoints.load(folder, state, _sharded_modules(state), strict)


class ModuleUnderFabric(nn.Module):
    """A module that was set up with Fabric, and is sharded without an optimizer if it is used before it has
    one.

    Fabric needs a module other than the user's to send `training_step` and marked methods through a call.
    """

    def __init__(self, module: nn.Module, shard_alone: Callable[[ModuleUnderFabric], Any]) -> None:
        super().__init__()
        self.module, self._shard_alone, self.has_optimizer = module, shard_alone, False
        self._stale = False

    def shard_alone(self) -> None:
        """Shard the module unless it is."""
        if vars(self.module).get(MODULE_ATTRIBUTE) is None:
            self._shard_alone(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in evaluation with the newest parameters and rank 0's buffers, which
        DistributedDataParallel spreads before each forward."""
        self.shard_alone()
        stale, self._stale = self._stale, self.module.training
        if not self.module.training:  # the script may have called eval() of its own module
            engine = engine_of(self.module)
            engine.finish_updates()
            if stale and engine.world_size > 1:
                broadcast_buffers(self.module, engine.collectives)
        return self.module(*args, **kwargs)


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        if vars(module.module).get(MODULE_ATTRIBUTE) is None:
            raise RuntimeError(
                "fabric.no_backward_sync: expected a module with an optimizer, got one without. Call "
                "fabric.setup_optimizers first."
            )
        return engine_of(module).collector.no_sync() if enabled else contextlib.nullcontext()


_ONE_OPTIMIZER = (
    "optimizer: expected one for a module, got {}. Put parameters with other settings into its param groups."
)


def _sharded_modules(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the modules in ``state`` that were set up, after those without an optimizer were sharded."""
    found = {key: each for key, each in state.items() if isinstance(each, ModuleUnderFabric)}
    for each in found.values():
        each.shard_alone()
    return {key: each.module for key, each in found.items()}


def _scales_loss(wrapper: nn.Module) -> bool:
    engine = vars(wrapper.module).get(MODULE_ATTRIBUTE)
    return engine is not None and engine.optimizer_step.scales_loss
