"""The engine that ``deepspeed.initialize`` returns: ``engine(batch); engine.backward(loss);
engine.step()``."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config.optimizer_traits import OPTIMIZERS
from zero_ext.data import ShardedLoader
from zero_ext.integrations.deepspeed.checkpoint_io import checkpoint_tags
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_tags import write_weights
from zero_ext.integrations.deepspeed.deepspeed_config import SettingsQuestions
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError, missing_member
from zero_ext.integrations.deepspeed.optimizer_types import DeepSpeedZeRoOffload
from zero_ext.integrations.transformers.model_patches import bind_methods
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.full_parameters import full_state_dict
from zero_ext.zero.api.zero_module import ZeroModule
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer


class DeepSpeedEngine(SettingsQuestions, ZeroModule):
    """A prepared model with DeepSpeed's methods. Calls, attributes and state_dict keys are the model's.

    ``global_steps`` counts optimizer steps, skipped ones included, ``micro_steps`` micro-batches.
    """

    optimizer: ZeroOptimizer | DeepSpeedZeRoOffload | None
    lr_scheduler: LRScheduler | None
    training_dataloader: ShardedLoader | None
    config: dict[str, Any]
    micro_steps: int
    inside_no_sync_ctxt: bool
    _boundary: bool | None
    _unmanaged_passes: int
    _unmanaged_samples: int
    _applied: bool

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer | DeepSpeedZeRoOffload | None,
        scheduler: LRScheduler | None,
        loader: ShardedLoader | None,
        config: dict[str, Any],
    ) -> None:
        super().__init__(module)
        # Its own attributes from here on; others that are set on a wrapper go to the wrapped module.
        vars(self).update(
            optimizer=optimizer,
            lr_scheduler=scheduler,
            training_dataloader=loader,
            config=config,
            micro_steps=0,
            inside_no_sync_ctxt=False,
            _boundary=None,
            _unmanaged_passes=0,
            _unmanaged_samples=0,
            _applied=False,
        )
        if self.zero_config.stage == 3:
            bind_methods(module)

    @property
    def _managed(self) -> bool:
        return self.zero_config.batch.managed_gradient_accumulation

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return engine_of(self).steps

    @property
    def global_samples(self) -> int:
        """Samples seen by whole steps so far; 0 if the JSON names no batch size."""
        if not self._managed:
            return self._unmanaged_samples
        return self.global_steps * (self.train_batch_size() or 0)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because fp16 gradients overflowed."""
        return engine_of(self).skipped_steps

    @property
    def device(self) -> torch.device:
        """Return where the model computes."""
        return engine_of(self).device

    @property
    def local_rank(self) -> int:
        """This process's rank on its host, as the launcher says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the state; None for one."""
        return checkpoint_sources(engine_of(self)).own.group

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among them."""
        return engine_of(self).rank

    def get_model_parallel_rank(self) -> int:
        """0: there is no model parallelism."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def optimizer_name(self) -> str | None:
        """Return the type of the JSON's optimizer, in lower case if it is DeepSpeed's own, else the class."""
        section = self.native.optimizer
        if section is None:
            return self.get_type()[0] if isinstance(self.optimizer, ZeroOptimizer) else None
        traits = OPTIMIZERS[section.type]
        own = traits.deepspeed_builders or traits.deepspeed_defaults
        return section.type.lower() if own else section.type

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            found = missing_member(self, name)
            if found is None:
                raise
            raise found from error

    # -- the loop -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. ``backward`` on its outputs divides gradients by the accumulation steps."""
        outputs = super().forward(*args, **kwargs)
        steps = self.gradient_accumulation_steps()
        return divided_once(outputs, steps) if steps > 1 and torch.is_grad_enabled() else outputs

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, to call ``backward`` on by hand."""
        self._need_optimizer("scale")
        return self.scale_loss(_checked_loss("scale", loss))

    def backward(  # type: ignore[override]  # DeepSpeed's returns the loss
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of the loss, scaled for fp16, divided by the accumulation steps unless ``scale_wrt_gas``
        is False; returns the divided loss."""
        self._need_optimizer("backward")
        _checked_loss("backward", loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._unmanaged_passes += not self._managed
        with self._until_boundary(), undivided():
            super().backward(loss, retain_graph=retain_graph)
        return loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; on the last of a step: optimizer, scheduler (unless skipped), zero_grad."""
        optimizer = self._need_optimizer("step")
        if self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.step: expected a call outside no_sync, got one inside. Leave the block first."
            )
        last = not self._managed or self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not last:
            return
        with self._around_step(lr_kwargs):
            optimizer.step()
        self._unmanaged_samples += self._unmanaged_passes * (
            (self.train_batch_size() or 0) // self.gradient_accumulation_steps()
        )
        self._unmanaged_passes = 0
        optimizer.zero_grad()

    @contextlib.contextmanager
    def _around_step(self, lr_kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Around a step of the optimizer, which the scheduler follows unless it is skipped."""
        skipped = self.skipped_steps
        yield
        self._applied = self.skipped_steps == skipped
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-batch under way is the last one of its step."""
        if self._boundary is not None or not self._managed:
            return bool(self._boundary)
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says by hand whether the next micro-batch is the last of its step, from now on."""
        self._need_managed("set_gradient_accumulation_boundary")
        self._boundary = bool(is_boundary)

    @contextlib.contextmanager
    def _until_boundary(self) -> Iterator[None]:
        """Around a backward pass: gradients that are kept whole anyway are reduced with the last one's.

        The engine counts micro-batches itself and would take this one for the last if the caller, who says
        where steps end, goes on for longer.
        """
        settings = self.zero_config
        accumulates = settings.stage < 2 or settings.offload.update_mode == "in_backward"
        goes_on = self._boundary is False or not self._managed
        with super().no_sync() if accumulates and goes_on else contextlib.nullcontext():
            yield

    def was_step_applied(self) -> bool:
        """Return whether the last call of :meth:`step` updated the parameters."""
        return self._applied

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local inside the block. The next backward or step outside reduces their sum."""
        if self.inside_no_sync_ctxt:
            raise RuntimeError(
                "engine.no_sync: expected one block, got one inside another. Drop the inner one."
            )
        self.inside_no_sync_ctxt = True
        try:
            with super().no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """``no_sync`` under DeepSpeed's other name."""
        self._need_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield

    def _need_managed(self, what: str) -> None:
        if not self._managed:
            raise RuntimeError(
                f"engine.{what}: managed_gradient_accumulation: expected true, got false. Call step() where "
                "a step ends."
            )

    def get_lr(self) -> list[float]:
        """Return the learning rate of every param group."""
        return [float(group["lr"]) for group in self._need_optimizer("get_lr").param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum or betas of every param group."""
        groups = self._need_optimizer("get_mom").param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[str]:
        """Return the optimizer's class by name."""
        return [str(checkpoint_sources(engine_of(self)).own.optimizer_class)]

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step before clipping, infinite if gradients overflowed; None
        before the first step and if nothing asked for it."""
        norm = engine_of(self).grad_norm
        return math.inf if norm is not None and math.isnan(norm) else norm

    def _need_optimizer(self, what: str) -> ZeroOptimizer:
        if not isinstance(self.optimizer, ZeroOptimizer):
            raise RuntimeError(
                f"engine.{what}: this engine has no optimizer. Pass one to initialize, or write an "
                "'optimizer' section in the JSON."
            )
        return self.optimizer

    # -- weights and checkpoints --------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything under ``save_dir/tag`` (default ``global_step{N}``); see :mod:`.tags`.

        Frozen parameters are saved too, so that a checkpoint is whole; ``exclude_frozen_parameters`` is
        accepted for callers that always pass it.
        """
        counters = {"micro_steps": self.micro_steps, "samples": self._unmanaged_samples}
        extras = checkpoint_tags.EngineExtras(self.lr_scheduler, self.training_dataloader, counters)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        state = {} if client_state is None else client_state
        checkpoint_tags.save(self, Path(save_dir), name, state, save_latest, extras)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load ``load_dir/tag`` (default: the latest), saved at any world size and stage.

        Without ``load_optimizer_states`` its weights, scheduler and loader are loaded, with
        ``load_module_only`` its weights alone; the engine goes on to count its steps. Returns its path and
        the client state; (None, {}) if ``load_dir`` has no ``latest`` file. A checkpoint of other parameters
        is refused whatever ``load_module_strict`` says.
        """
        if custom_load_fn is not None:
            raise DeepSpeedFeatureError(
                "load_checkpoint(custom_load_fn=...): it is not supported. Load with "
                "zero_ext.load_full_state_dict."
            )
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        loader = None if load_module_only else self.training_dataloader
        optimizer = load_optimizer_states and not load_module_only
        path, client_state, counters = checkpoint_tags.load(
            self, Path(load_dir), tag, scheduler, loader, optimizer
        )
        if path is not None and optimizer:
            self.micro_steps = counters.get("micro_steps", 0)
            self._unmanaged_samples = counters.get("samples", 0)
        return path, client_state

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return every parameter and persistent buffer, whole, on every rank; a collective."""
        return self._without_frozen(full_state_dict(self), exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load whole tensors that every rank has; a collective."""
        self.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole weights in compute precision on rank 0, None on the others; a collective."""
        values = full_state_dict(self, rank0_only=True)
        return self._without_frozen(values, exclude_frozen_parameters) if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _without_frozen(self, values: dict[str, torch.Tensor], exclude: bool) -> dict[str, torch.Tensor]:
        frozen = {name for name, item in self.module.named_parameters() if not item.requires_grad}
        return {name: value for name, value in values.items() if not (exclude and name in frozen)}

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights in compute precision to one file from rank 0, at any stage; a collective.

        A name that ends in ``.safetensors`` gets that format, another one torch's.
        """
        values = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        write_weights(engine_of(self), values, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def compile(self, *_: Any, **__: Any) -> None:
        """Raise ``DeepSpeedFeatureError``: blocks are compiled before the model is sharded."""
        raise DeepSpeedFeatureError(
            "engine.compile: it is not supported. Compile the model's blocks before initialize "
            "(for block in model.layers: block.compile())."
        )

    def empty_partition_cache(self) -> None:
        """Drop what was gathered ahead."""
        engine_of(self).prefetcher.release_idle()

    def destroy(self) -> None:
        """Nothing to do: memory, files and connections go with the model."""


def _checked_loss(what: str, loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    if isinstance(loss, torch.Tensor) and not loss.requires_grad:
        found += " without a graph"
    raise ValueError(
        f"engine.{what}: expected a loss of one element that requires a gradient, got {found}. Reduce it, "
        "or call outputs.backward(gradients)."
    )


# How many calls of engine.backward, which divides the loss itself, are under way in the process.
_UNDIVIDED = 0


def divided_once(outputs: Any, steps: int) -> Any:
    """Return ``outputs`` with views in place of tensors that have a graph, in tuples, lists and dicts too.

    Gradients of the views are divided by ``steps``. DeepSpeed puts hooks on the tensors themselves, which
    divides twice where a loss that the model returns was computed from logits that it returns as well.
    """
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is None:
            return outputs
        view = outputs.view_as(outputs)
        view.register_hook(lambda gradient: gradient if _UNDIVIDED else gradient / steps)
        return view
    if isinstance(outputs, list | tuple):
        items = [divided_once(item, steps) for item in outputs]
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, dict):
        copied = copy.copy(outputs)
        for name, item in outputs.items():
            copied[name] = divided_once(item, steps)
        return copied
    return outputs


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Around a backward pass of a loss that has been divided already."""
    global _UNDIVIDED
    _UNDIVIDED += 1
    try:
        yield
    finally:
        _UNDIVIDED -= 1


class RepeatingLoader:
    """Iterates over ``loader`` without end; each new round is the loader's next epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader: the loader has no batches. Pass one with at least one batch."
            ) from None
