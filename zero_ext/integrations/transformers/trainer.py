"""``ZeroTrainerMixin``: any Hugging Face Trainer on a model that zero_ext shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import Trainer

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.config import ZeroConfig
from zero_ext.config.sources.config_source import ConfigSource, log_notes, read_config
from zero_ext.integrations.generation import generate_unsharded
from zero_ext.integrations.load_weights import load_weights
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.transformers.layout_trainer import LayoutTrainerMixin
from zero_ext.integrations.transformers.model_patches import (
    BoundMethod,
    checkpoint_by_configuration,
    is_prepared,
    mark_prepared,
)
from zero_ext.integrations.transformers.private_methods import check_transformers
from zero_ext.integrations.transformers.reference_model import mix_by_shards
from zero_ext.integrations.transformers.streamed_saving import can_stream, save_streamed
from zero_ext.integrations.transformers.trainer_checkpoints import (
    STATE_FOLDER,
    check_resume,
    last_complete_checkpoint,
)
from zero_ext.integrations.transformers.trainer_config import (
    refuse_adapters,
    refuse_arguments,
    refuse_duplicates,
    refuse_tokenizer,
    resolve_settings,
)
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler, check_scheduler
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import full_state_dict
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer
from zero_ext.zero.engine import Engine

logger = logging.getLogger("zero_ext")


class ZeroTrainerMixin(LayoutTrainerMixin):
    """Put before a Trainer class, it trains, evaluates, saves and resumes with the model sharded.

    `class MyTrainer(ZeroTrainerMixin, Trainer)` takes what the Trainer takes, and `zero_config`. The model is
    sharded in place when training or evaluation begins. Until then it is an ordinary model that may be
    changed.

    Args:
        *args: passed on to the Trainer.
        zero_config: as for [`load_config`][zero_ext.load_config]; default ZeRO-3. What it leaves out or calls
            "auto" comes from TrainingArguments: batch sizes, accumulation, clipping, precision, and an
            optimizer's or scheduler's settings.
        **kwargs: passed on to the Trainer.

    Attributes:
        model: the Trainer's model.
        optimizer: the Trainer's optimizer.
        lr_scheduler: the Trainer's scheduler.

    Raises:
        ConfigError: arguments contradict `zero_config`; both sides are shown.
        ImportError: a transformers that is not supported.
        ValueError: arguments that are not supported, a tokenizer that has more tokens than the model, or a
            model with PEFT's adapters, which `ZeroPeftTrainer` is for. Nothing was changed.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero_config: ConfigSource = None, **kwargs: Any) -> None:
        check_transformers()
        self._written = read_config(zero_config)
        super().__init__(*args, **kwargs)
        self._check_configuration()

    def _check_configuration(self) -> None:
        """Complete the configuration from the arguments of the Trainer, which has them now, or raise."""
        refuse_arguments(self)
        self._check_adapters()
        refuse_tokenizer(self.model, self.processing_class)
        steps = self.args.max_steps if self.args.max_steps > 0 else None
        self._zero_settings, notes = resolve_settings(self._written, self.args, steps)
        if not isinstance(self.optimizer, ZeroOptimizer):  # that one is what a section has become
            made, schedule = self.optimizer, self.lr_scheduler
            refuse_duplicates(self._zero_settings, made or self.optimizer_cls_and_kwargs, schedule)
        if self._zero_settings.optimizer is not None:  # tried out: what it refuses is said now
            value = torch.zeros(1, device="cpu", requires_grad=True)
            build_optimizer(self._zero_settings.optimizer, [value], self.model)
        self._share_batches()
        log_notes(notes)

    def _check_adapters(self) -> None:
        refuse_adapters(self)

    @property
    def _includes_frozen(self) -> bool:
        """True if checkpoints hold the parameters that nothing trains."""
        return True

    @property
    def zero_config(self) -> ZeroConfig:
        """The configuration in force, completed from TrainingArguments."""
        return self._zero_settings

    @property
    def _engine(self) -> Engine:
        return engine_of(self.model)

    # -- the accelerator, the device ----------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Parameters themselves are in compute precision, with fp32 masters: nothing is cast on the way.
        found = {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}
        if getattr(self.args, "parallelism_config", None) is not None:
            del found["parallelism_config"]  # Accelerate would shard with FSDP2 or start DeepSpeed
        return found

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Left to the engine, which moves a unit at a time."""

    # -- sharding -----------------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._zero_settings, _ = resolve_settings(self._written, self.args, max_steps)
        self._shard_for_training()
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _shard_for_training(self) -> None:
        if is_prepared(self.model):
            self._check_own_optimizer()
        else:
            self._lay_out(self.optimizer)
            made = self.create_optimizer()
            if self._zero_settings.scheduler is not None and self.lr_scheduler is None:
                check_scheduler(self._zero_settings.scheduler, made)
            self.optimizer = self._prepare(self.model, made)
            checkpoint_by_configuration(self.model)
        mark_prepared(self.model, self.optimizer)
        if self._engine.optimizer_step.scales_loss:
            self.accelerator.scaler = _LossScale(self._engine)
        self._finish_sharding()

    def _finish_sharding(self) -> None:
        """Shard the reference model, if there is one, as the model; before each training and evaluation."""
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module):
            if not is_prepared(reference):
                self._prepare(reference, None)
                mark_prepared(reference, None)
            mix_by_shards(self.model, reference, self.callback_handler.callbacks)
        if getattr(self.args, "ds3_gather_for_generation", False):  # of TRL's online trainers
            self.model.generate = BoundMethod(self.model, "generate", generate_unsharded)

    def _prepare(self, model: nn.Module, optimizer: Any) -> Any:
        if self.args.torch_compile:
            # The blocks will be, with these options. Accelerate, which comes later, leaves the model alone.
            options = self.accelerator.state.dynamo_plugin.to_kwargs()
            model = torch.compile(model, **options)  # type: ignore[assignment]
        try:
            return prepare(
                model,
                optimizer,
                self._zero_settings,
                process_group=self._mesh,
                wrap=False,
                device=self.args.device,
            )[1]
        except RuntimeError as error:
            if self._asks_for_smaller_batch(error):  # which would not help
                raise MemoryError(str(error)) from error
            raise

    def _check_own_optimizer(self) -> None:
        name = type(self.model).__name__
        if self._engine.optimizer_step.stepper is None:
            raise RuntimeError(
                f"{name}: it was sharded for evaluation, without an optimizer, by a trainer without "
                "train_dataset. Pass train_dataset before the first evaluate()."
            )
        if not isinstance(self.optimizer, ZeroOptimizer) or self.optimizer.engine is not self._engine:
            raise RuntimeError(
                f"{name}: it was sharded by another trainer or zero_ext.prepare, and this trainer does not "
                "have its optimizer. Use that trainer, or pass optimizers=(the prepared one, None)."
            )

    def _shard_for_evaluation(self) -> None:
        if not is_prepared(self.model):
            if self.train_dataset is not None:
                self._shard_for_training()
                return
            self._lay_out(None)
            self._prepare(self.model, None)
            mark_prepared(self.model, None)
        self._finish_sharding()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer: the one given, else that of `zero_config`, else that of TrainingArguments.

        Args:
            *args: passed on to the Trainer.
            **kwargs: passed on to the Trainer.

        Returns:
            The optimizer, which is not prepared yet.
        """
        policy = self._zero_settings.optimizer
        if self.optimizer is None and policy is not None:
            decayed = set(self.get_decay_parameter_names(self.model))
            trained = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
            groups: list[dict[str, Any]] = [
                {"params": [each for name, each in trained if name in decayed]},
                {"params": [each for name, each in trained if name not in decayed], "weight_decay": 0.0},
            ]
            chosen = [group for group in groups if group["params"]]
            self.optimizer = build_optimizer(policy, chosen, self.model)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the scheduler: the one given, else that of `zero_config`, else that of TrainingArguments.

        Args:
            num_training_steps: optimizer steps of the whole training.
            optimizer: the optimizer; default the Trainer's.

        Returns:
            The scheduler.
        """
        policy = self._zero_settings.scheduler
        if self.lr_scheduler is None and policy is not None:
            self.lr_scheduler = build_scheduler(policy, optimizer or self.optimizer)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(batch_size, *args, **kwargs)
        except RuntimeError as error:
            if self._asks_for_smaller_batch(error) and is_prepared(self.model):
                self._end_broken_step(error, batch_size)
            raise

    def _asks_for_smaller_batch(self, error: RuntimeError) -> bool:
        return bool(self.args.auto_find_batch_size and should_reduce_batch_size(error))

    def _end_broken_step(self, error: RuntimeError, batch_size: int | None) -> None:
        """Let one rank begin the loop again, or raise on all of several ranks: the others wait in collectives
        that this rank cannot join."""
        collectives = self._engine.collectives
        if collectives.world_size == 1:
            self._engine.clear_gradients()  # and count micro-batches from 0
            return
        reason = (
            f"rank {collectives.rank}: expected a batch of {batch_size} to fit, got an out-of-memory error. "
            "With several ranks auto_find_batch_size cannot try again, because the others are inside this "
            "step. Start all ranks again with a smaller per_device_train_batch_size."
        )
        collectives.abort(reason)
        raise RuntimeError(reason) from error

    # -- the step -----------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leave clipping to the step: ``max_grad_norm`` is the configuration's ``gradient_clipping``."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._zero_settings.gradient_clipping or self._zero_settings.offload.update_mode == "in_backward":
            return None  # the step takes the norm, or nobody does
        return self._engine.clip_grad_norm_(float("inf"))

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if grad_norm is None:
            # The host waits for it only where it is logged.
            grad_norm = self._engine.optimizer_step.grad_norm_tensor
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the newest parameters of the sharded model, on all ranks in step.

        Args:
            *args: passed on to the Trainer.
            **kwargs: passed on to the Trainer.

        Returns:
            What the Trainer returns.
        """
        self._shard_for_evaluation()
        self._engine.finish_updates()
        return super().evaluation_loop(*args, **kwargs)

    # -- saving -------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and is_prepared(self.model):
            if can_stream(self.model):
                folder = Path(output_dir or str(self.args.output_dir))
                save = super()._save
                save_streamed(
                    self.model, folder, self.args.should_save, lambda others: save(str(others), state_dict={})
                )
                return
            state_dict = full_state_dict(self.model, rank0_only=not self.args.save_on_each_node)
        if self.args.should_save or not is_prepared(self.model):
            super()._save(output_dir, state_dict=state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `from_pretrained` reads it; all ranks call it.

        Args:
            output_dir: as in the Trainer.
            _internal_call: as in the Trainer.
        """
        if self.args.should_save or not is_prepared(self.model):
            super().save_model(output_dir, _internal_call=_internal_call)
        else:
            # Up to transformers 5.21 only ranks that write call `_save`, and all have shards to gather.
            self._save(output_dir)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            Path(output_dir) / STATE_FOLDER,
            self.model,
            step=self.state.global_step,
            scheduler=self.lr_scheduler,
            async_save=False,
            include_frozen=self._includes_frozen,
        )

    def _save_scaler(self, output_dir: str) -> None:
        """Save nothing: the loss scale goes with the optimizer."""

    # -- resuming -----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train.

        Args:
            resume_from_checkpoint: a folder, or True for the newest checkpoint that is complete.
            *args: passed on to the Trainer.
            **kwargs: passed on to the Trainer.

        Returns:
            What the Trainer returns.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(str(self.args.output_dir))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Here the model may not be sharded yet; values come with the optimizer's state.
        check_resume(resume_from_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not self._load_state(checkpoint, self.lr_scheduler):
            logger.warning("%s holds weights only: optimizer and schedule start anew", checkpoint)

    def _load_state(self, folder: str, scheduler: Any = None) -> bool:
        """Load a checkpoint; return whether it has more than weights, unlike one of ``save_only_model``."""
        state = Path(folder) / STATE_FOLDER
        if not state.is_dir():
            self._load_weights(folder)
            return False
        load_checkpoint(state, self.model, scheduler=scheduler, include_frozen=self._includes_frozen)
        return True

    def _load_weights(self, folder: str) -> None:
        load_weights(self.model, folder, strict=False)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: the loss scale comes with the optimizer."""

    def _load_best_model(self) -> None:
        folder = str(self.state.best_model_checkpoint)
        logger.info("loading the best model from %s (%s)", folder, self.state.best_metric)
        random = torch.get_rng_state()  # which go on as they were
        try:
            self._load_state(folder)
        finally:
            torch.set_rng_state(random)


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with ZeRO.

    It is [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin] before the Trainer.

    It takes what the Trainer takes, and `zero_config`.
    """


class _LossScale:
    """Stands in for accelerate's gradient scaler: the engine scales the loss, unscales in its step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward`` on."""
        return self._engine.scale_loss(loss)
