"""``ZeroAccelerator``: Hugging Face Accelerate's loop around models that are sharded in place."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, DummyOptim, DummyScheduler, convert_file_size_to_int
from torch import nn

from zero_ext.checkpoint.weights.save_weights import save_weights
from zero_ext.config import ZeroConfig
from zero_ext.config.sources.config_source import ConfigSource, log_notes, read_config
from zero_ext.integrations.accelerate.accelerate_wrappers import AcceleratedModule, AcceleratedZeroOptimizer
from zero_ext.integrations.accelerate.accelerator_config import (
    refuse_arguments,
    refuse_model,
    resolve_settings,
    with_accumulation,
)
from zero_ext.integrations.accelerate.accelerator_state import CheckpointingAccelerator
from zero_ext.integrations.batch_sharing import BatchSharingAccelerator
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.requested_layout import apply_layout, layout_mesh, parallelism_problems
from zero_ext.integrations.transformers.model_patches import is_prepared, mark_prepared
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import full_state_dict
from zero_ext.zero.api.zero_module import unwrapped
from zero_ext.zero.engine import Engine

_SIGNATURE = inspect.signature(Accelerator.__init__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ZeroAccelerator(BatchSharingAccelerator, CheckpointingAccelerator):
    """`accelerate.Accelerator` with ZeRO.

    It takes what Accelerator takes, and `config`. Models and optimizers that are given to `prepare` are
    sharded in place. A model that is prepared without an optimizer is for evaluation until its optimizer is
    prepared. Methods that save, load or gather a model are collectives of all ranks.

    Args:
        *args: passed on to Accelerator.
        config: as for [`load_config`][zero_ext.load_config]; default ZeRO-3. Precision and gradient
            accumulation that it leaves out, or calls "auto", come from Accelerator's arguments and from
            `accelerate launch`.
        **kwargs: passed on to Accelerator.

    Raises:
        ConfigError: arguments contradict `config`; both sides are shown.
        ValueError: arguments or settings of `accelerate launch` that are not supported.
        ImportError: accelerate is too old.
    """

    def __init__(self, *args: Any, config: ConfigSource = None, **kwargs: Any) -> None:
        arguments = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        refuse_arguments(arguments)
        self._settings, self._precision, notes = resolve_settings(read_config(config), arguments)
        if arguments.get("gradient_accumulation_plugin") is None:
            arguments["gradient_accumulation_steps"] = self._settings.batch.gradient_accumulation_steps
        self._pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self._made: dict[nn.Module, tuple[AcceleratedModule, Any]] = {}
        # Parameters are in compute precision, with fp32 masters: Accelerate casts and scales nothing.
        # It would also shard sequences itself, by FSDP2 or DeepSpeed.
        parallelism = arguments.pop("parallelism_config", None)
        super().__init__(**{**arguments, "mixed_precision": "no"})
        self._refuse_layout(parallelism)
        self._mesh = layout_mesh(self._settings, self.num_processes, self.device.type)
        self.sequence_ranks = self._settings.parallel.cp
        log_notes(notes)

    def _refuse_layout(self, parallelism: Any) -> None:
        """Raise ``ValueError`` for lengths that do not match the ranks, which are known now."""
        found = parallelism_problems(parallelism, self.num_processes)
        if self._settings.parallel.cp > 1 and self.dispatch_batches:
            found.append("dispatch_batches gives every rank other samples. Leave it out.")
        if found:
            raise ValueError(f"ZeroAccelerator: unsupported arguments: {' '.join(found)} Change them.")

    @property
    def config(self) -> ZeroConfig:
        """The configuration in force, completed from Accelerator's arguments."""
        return with_accumulation(self._settings, self.gradient_accumulation_steps)

    @property
    def mixed_precision(self) -> str:
        """The precision of parameters: "no", "bf16" or "fp16"."""
        return self._precision

    # -- preparing ----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Shard models with their optimizers, and prepare loaders and schedulers; a collective of all ranks.

        Args:
            *args: models, optimizers, loaders and schedulers in any order. Each optimizer belongs to the
                model that has its parameters, given here or in an earlier call.
            device_placement: as in Accelerate.

        Returns:
            The prepared objects in the order of `args`.

        Raises:
            ValueError: an optimizer of no model or of several, a second optimizer of a model, or a model that
                cannot be sharded. Nothing was changed.
        """
        self._pairs = self._paired(args)
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._pairs, self._made = [], {}

    def _paired(self, args: Iterable[Any]) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Return the new optimizers of ``args``, each with the model that has its parameters."""
        models = [each for each in args if isinstance(each, nn.Module)]
        for each in models:
            refuse_model(each)
        pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        for each in args:
            if isinstance(each, DummyOptim | DummyScheduler):
                raise ValueError(
                    f"prepare: expected torch's optimizers and schedulers, got a {type(each).__name__}, "
                    "which is DeepSpeed's. Make an optimizer such as torch.optim.AdamW and a scheduler."
                )
            if not isinstance(each, torch.optim.Optimizer) or isinstance(each, AcceleratedOptimizer):
                continue
            model = self._model_of(each, models)
            if any(model is other for other, _ in pairs) or self._optimizer_of(model) is not None:
                raise ValueError(
                    f"prepare: expected one optimizer for {type(model).__name__}, got a second one, "
                    f"{type(each).__name__}. Put parameters with other settings into param groups of one "
                    "optimizer."
                )
            pairs.append((model, each))
        if self._precision == "fp16" and not self._settings.loss_scale.static:
            several = len(pairs) + len(self._optimizers)
            if pairs and several > 1:
                raise ValueError(
                    f"loss_scale: expected a static scale for {several} models in fp16, as one loss may go "
                    "through all of them, got a dynamic one. Set loss_scale.static in config=, or use bf16."
                )
        return pairs

    def _model_of(self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module:
        wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
        candidates = dict.fromkeys(unwrapped(each) for each in (*models, *self._models))
        found = [each for each in candidates if not wanted.isdisjoint(map(id, each.parameters()))]
        if len(found) != 1:
            names = ", ".join(type(each).__name__ for each in found) or "none"
            raise ValueError(
                f"prepare: expected the parameters of {type(optimizer).__name__} in one model, got {names}. "
                "Prepare the model before or together with its optimizer, and make one optimizer per model."
            )
        return found[0]

    def _optimizer_of(self, model: nn.Module) -> AcceleratedZeroOptimizer | None:
        """Return the prepared optimizer of a model."""
        engine = engine_of(model) if is_prepared(model) else None
        return next((each for each in self._optimizers if each.optimizer.engine is engine), None)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model; a collective of all ranks.

        Args:
            model: without parameters it only moves to the device. One that is prepared is returned as it is.
            device_placement: as in Accelerate.
            evaluation_mode: shard it without an optimizer.

        Returns:
            The prepared model.

        Raises:
            ValueError: the model cannot be sharded. Nothing was changed.
        """
        refuse_model(model)
        if next(model.parameters(), None) is None:
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return prepared
        inner = unwrapped(model)
        optimizer = None if evaluation_mode else next((o for m, o in self._pairs if m is inner), None)
        if optimizer is None and isinstance(model, AcceleratedModule):
            made = model
        else:
            made, _ = self._made.get(inner) or self._shard(inner, optimizer, device_placement)
        if not any(each is made for each in self._models):
            self._models.append(made)
        return made

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedZeroOptimizer:
        """Shard an optimizer with its model; a collective of all ranks.

        Args:
            optimizer: over the parameters of a prepared model. One that is prepared is returned as it is.
            device_placement: as in Accelerate.

        Returns:
            The prepared optimizer.

        Raises:
            ValueError: as for `prepare`.
        """
        prepared: AcceleratedZeroOptimizer
        if isinstance(optimizer, AcceleratedZeroOptimizer):
            prepared = optimizer
        elif not self._pairs:  # called by the script
            prepared = self.prepare(optimizer, device_placement=[device_placement])
        else:
            model = next(model for model, each in self._pairs if each is optimizer)
            _, prepared = self._made.get(model) or self._shard(model, optimizer, device_placement)
        if not any(each is prepared for each in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def _shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device_placement: bool | None
    ) -> tuple[AcceleratedModule, Any]:
        moves = self.device_placement if device_placement is None else device_placement
        # A model that was prepared for evaluation gets another engine, and the script keeps its wrapper.
        wrapper = next((each for each in self._models if unwrapped(each) is model), None)
        mesh = apply_layout(model, optimizer, self._settings, self._mesh)
        if wrapper is not None:
            engine_of(model).wrappers.discard(wrapper)
        try:
            _, made = prepare(
                model,
                optimizer,
                self.config,
                process_group=mesh,
                wrap=False,
                device=self.device if moves else None,
            )
        finally:
            if wrapper is not None:
                engine_of(model).wrappers.add(wrapper)
        mark_prepared(model, None)
        if wrapper is None:
            autocast = self.autocast if self._precision in _DTYPES else None
            wrapper = AcceleratedModule(model, autocast, getattr(self.ddp_handler, "broadcast_buffers", True))
        result = wrapper, None if made is None else AcceleratedZeroOptimizer(made)
        if optimizer is not None:  # which the same call of prepare asks for
            self._made[model] = result
        return result

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler: it steps when its optimizer did.

        Args:
            scheduler: over an optimizer, prepared or not.

        Returns:
            The prepared scheduler.
        """
        prepared = super().prepare_scheduler(scheduler)
        own = getattr(prepared.scheduler, "optimizer", None)
        prepared.optimizers = [each for each in self._optimizers if each.steps(own)] or prepared.optimizers
        return prepared

    # -- steps --------------------------------------------------------------------------------------------

    @property
    def _engines(self) -> list[Engine]:
        return [each.optimizer.engine for each in self._optimizers]

    @property
    def _scaling(self) -> list[Engine]:
        """Those that scale the loss, all by the same factor."""
        return [engine for engine in self._engines if engine.optimizer_step.scales_loss]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward of the loss, divided by the accumulation steps and scaled for fp16.

        Args:
            loss: 0-d, as computed.
            **kwargs: passed on to `loss.backward`.

        Raises:
            RuntimeError: no optimizer is prepared, or the accumulation steps changed since.
        """
        steps, engines = self.gradient_accumulation_steps, self._engines
        if not engines:
            raise RuntimeError(
                "backward: expected a prepared optimizer, got none, so nothing would use the gradients. Pass "
                "the optimizer to accelerator.prepare."
            )
        prepared = {engine.config.batch.gradient_accumulation_steps for engine in engines}
        if prepared != {steps}:
            raise RuntimeError(
                f"gradient_accumulation_steps: expected {sorted(prepared)}, with which the models were "
                f"prepared, got {steps}. Set it before accelerator.prepare."
            )
        loss = loss / steps
        scaled = loss
        for engine in engines:
            scaled = engine.scale_loss(loss)  # by the same factor, which _paired ensures
        scaled.backward(**kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of the backward passes inside.

        Stages 0 and 1 keep them local until a pass outside. Stages 2 and 3 reduce every pass into shards, so
        that no rank stores full gradients.

        Args:
            model: the prepared model.

        Yields:
            Nothing.
        """
        engine = engine_of(model) if is_prepared(unwrapped(model)) else None
        local = engine is not None and engine.config.stage < 2
        with engine.collector.no_sync() if engine and local else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing for batches that are even on all ranks.

        Args:
            joinables: no effect.
            even_batches: as in Accelerate.

        Yields:
            Nothing.

        Raises:
            ValueError: `even_batches` is False, or Accelerator's is: a rank that runs out of batches would
                leave the others waiting.
        """
        if not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs: expected even_batches=True, got False: all ranks take part in each "
                "forward of a sharded model. Leave even_batches out."
            )
        yield

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the precision of the parameters inside.

        Args:
            autocast_handler: as in Accelerate; default Accelerator's.

        Yields:
            Nothing.
        """
        handler = autocast_handler or self.autocast_handler
        kwargs = {} if handler is None else handler.to_kwargs()
        dtype = _DTYPES.get(self._precision)
        with (
            contextlib.nullcontext()
            if dtype is None
            else torch.autocast(self.device.type, dtype=dtype, **kwargs)
        ):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the step unscales.

        Args:
            optimizer: no effect.

        Raises:
            RuntimeError: gradients are scaled (fp16), and stay so until the step.
        """
        if self._scaling:
            raise RuntimeError(
                "unscale_gradients: expected gradients without a loss scale, got those of fp16, which the "
                "step unscales. Call accelerator.clip_grad_norm_ or clip_grad_value_, which follow the scale."
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float | int = 2) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`; a collective.

        Args:
            parameters: all that a prepared model trains, or others.
            max_norm: the largest norm allowed.
            norm_type: as in torch.

        Returns:
            The norm before clipping, without the loss scale of fp16, 0-d.

        Raises:
            ValueError: in fp16, `parameters` are not all that a model trains, or `norm_type` is not 2 or
                infinity.
        """
        targets = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, targets))
        for each in self._optimizers:
            engine = each.optimizer.engine
            trained = {id(one) for group in each.param_groups for one in group["params"]}
            if norm_type in (2, float("inf")) and trained <= ids <= trained | set(map(id, engine.index)):
                norm: torch.Tensor = engine.clip_grad_norm_(max_norm, norm_type)
                return norm
        if self._scaling:
            raise ValueError(
                "clip_grad_norm_: expected all parameters that one model trains and norm_type 2 or inf in "
                f"fp16, got {len(targets)} parameters and norm_type {norm_type}. Pass model.parameters()."
            )
        return torch.nn.utils.clip_grad_norm_(targets, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of the gradients to `clip_value`; a collective.

        Args:
            parameters: of a prepared model, or others.
            clip_value: the largest absolute value allowed, without the loss scale of fp16.
        """
        scale = max([engine.optimizer_step.scaler.scale for engine in self._scaling], default=1.0)
        torch.nn.utils.clip_grad_value_(parameters, clip_value * scale)

    # -- models and weights -------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the script's own model, which stays sharded.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: no effect on a sharded model, which has none.
            keep_torch_compile: as in Accelerate.

        Returns:
            The module inside.
        """
        inner: nn.Module = super().unwrap_model(unwrapped(model), keep_fp32_wrapper, keep_torch_compile)
        return inner

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return full weights in host memory of rank 0; a collective.

        Args:
            model: prepared or not.
            unwrap: no effect: names have no prefix.

        Returns:
            Tensors by name, on ranks other than 0 an empty dict.
        """
        if not is_prepared(unwrapped(model)):
            found: dict[str, Any] = super().get_state_dict(model, unwrap)
            return found
        return full_state_dict(model, rank0_only=True)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write weights as `load_checkpoint_in_model` reads them, a tensor at a time; a collective.

        Args:
            model: prepared or not.
            save_directory: is made if it is missing.
            max_shard_size: bytes of a file, or text such as "5GB".
            safe_serialization: False pickles the weights, and rank 0 then holds all of them.

        Raises:
            ValueError: `max_shard_size` is no size.
            CollectiveError: on every rank, if writing fails.
        """
        if not safe_serialization or not is_prepared(unwrapped(model)):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        save_weights(model, save_directory, max_file_bytes=convert_file_size_to_int(max_shard_size))
