"""The engine that ``deepspeed.initialize`` returns for a pipeline: ``engine.train_batch(data_iter)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from zero_ext.data import ShardedLoader
from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine, RepeatingLoader
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.pipeline_module import PipelineError, PipelineModule
from zero_ext.parallel.pipeline import Pipeline
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

Batch = tuple[tuple[torch.Tensor, ...], list[Any]]


def _refused(name: str) -> Any:
    def method(*_: Any, **__: Any) -> NoReturn:
        """Raise ``PipelineError``: a pipeline runs whole batches."""
        raise PipelineError(
            f"engine.{name}: a pipeline runs full batches. Call engine.train_batch(data_iter) or eval_batch."
        )

    return method


class PipelineEngine(DeepSpeedEngine):
    """A prepared :class:`PipelineModule` with DeepSpeed's methods, in every ZeRO stage.

    ``micro_batches`` of a step are the JSON's gradient_accumulation_steps; an iterator yields one at a time,
    ``(inputs, labels)``, on the ranks of the first stage, which read the inputs, and of the last, which read
    the labels. Inputs are a tensor or a tuple of them, [samples, ...], of one shape in all micro-batches of
    a batch.
    """

    module: PipelineModule
    data_iterator: Iterator[Any] | None
    batch_fn: Callable[[Any], Any] | None
    _pipeline: Pipeline

    def __init__(
        self,
        module: PipelineModule,
        optimizer: ZeroOptimizer | None,
        scheduler: LRScheduler | None,
        loader: ShardedLoader | None,
        config: dict[str, Any],
    ) -> None:
        super().__init__(module, optimizer, scheduler, loader, config)
        vars(self).update(
            data_iterator=None,
            batch_fn=None,
            _pipeline=Pipeline(module, optimizer, micro_batches=self.micro_batches),
        )

    # -- facts --------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """All ranks; ``dp_world_size`` of them see other samples."""
        return dist.get_world_size()

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return dist.get_rank()

    @property
    def pipeline_parallelism(self) -> bool:
        """True."""
        return True

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of one; None if nobody said."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """The one that this rank has."""
        return self.module.stage_id

    def get_pipeline_parallel_rank(self) -> int:
        """Return the same."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Return whether this rank reads inputs."""
        return self.module.is_first

    def is_last_stage(self) -> bool:
        """Return whether this rank reads labels."""
        return self.module.is_last

    # -- data ---------------------------------------------------------------------------------------------

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the source of micro-batches for :meth:`train_batch` from now on."""
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Do the same of a loader."""
        self.set_dataiterator(iter(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """``fn`` makes ``(inputs, labels)`` of what the iterator yields."""
        self.batch_fn = fn

    def _training_data(self) -> Iterator[Any] | None:
        """Return what was set, else a new pass through the loader of ``training_data``."""
        if self.data_iterator is None and self.training_dataloader is not None:
            self.data_iterator = RepeatingLoader(self.training_dataloader)
        return self.data_iterator

    def _read(self, data: Callable[[], Iterator[Any] | None]) -> Batch:
        """Return the inputs of the next batch, whole, and its labels by micro-batch; empty where nothing is
        read.
        """
        if not (self.is_first_stage() or self.is_last_stage()):
            return (), []
        pairs = micro_batches_of(data(), self.micro_batches, self.batch_fn)
        inputs = joined([pair[0] for pair in pairs]) if self.is_first_stage() else ()
        labels = [pair[1] for pair in pairs] if self.is_last_stage() else []
        there: Batch = pytree.tree_map_only(torch.Tensor, lambda each: each.to(self.device), (inputs, labels))
        return there

    # -- batches ------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step on the next ``micro_batches`` of ``data_iter`` (from now on; else of what was set, or of
        ``training_data``); the scheduler follows unless the step was skipped. A collective of all ranks.

        Returns the mean loss over micro-batches and data-parallel ranks, 0-d float32, on all ranks.

        Raises ``RuntimeError`` on all ranks for data that ends or cannot be used on one, and if a stage
        fails.
        """
        self._need_optimizer("train_batch")
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: it was called under no_grad. Leave that, or call eval_batch.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        with self._around_step():
            loss = self._run(self._pipeline.train_batch, self._training_data, self._loss)
        self.micro_steps += self.micro_batches
        return loss.to(self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of the next batch of ``data_iter``, without gradients; else as
        :meth:`train_batch`.

        Without ``compute_loss``, with ``reduce_output`` None, a list of the outputs of each micro-batch,
        where the last stage is; None elsewhere. ``return_logits`` gives a pair, with the outputs of the last
        micro-batch, there too. The loss is on all ranks whatever ``bcast_loss`` says.
        """
        if num_micro_batches not in (None, self.micro_batches):
            raise DeepSpeedFeatureError(
                f"eval_batch: expected num_micro_batches {self.micro_batches}, the "
                f"gradient_accumulation_steps, got {num_micro_batches}. Leave it out."
            )
        if reduce_output != ("avg" if compute_loss else None):
            raise DeepSpeedFeatureError(
                f"eval_batch: compute_loss={compute_loss} with reduce_output={reduce_output!r} is not "
                "supported. Use reduce_output='avg' for losses, and None for outputs (compute_loss=False)."
            )
        collected: list[Any] = []

        def loss(outputs: Any, labels: Any) -> torch.Tensor:
            if return_logits or not compute_loss:
                collected.append(outputs)
            return self._loss(outputs, labels) if compute_loss else torch.zeros((), device=self.device)

        mean = self._run(self._pipeline.eval_batch, lambda: data_iter, loss).to(self.device)
        found = mean if compute_loss else (collected or None)
        return (found, collected[-1] if collected else None) if return_logits else found

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs if self.module.loss_fn is None else self.module.loss_fn(outputs, labels)
        return loss

    def _run(
        self,
        batch: Callable[..., torch.Tensor],
        data: Callable[[], Iterator[Any] | None],
        loss: Callable[[Any, Any], torch.Tensor],
    ) -> torch.Tensor:
        """Return what ``batch`` of the pipeline makes of the next batch of ``data``. Its targets are the
        micro-batches' numbers, so that labels may be anything."""
        everyone = checkpoint_sources(engine_of(self)).full.everyone
        inputs, labels = raise_on_all_ranks(everyone, lambda: self._read(data), "reading a batch")
        numbers = torch.arange(self.micro_batches, device="cpu") if self.is_last_stage() else None
        own = self.module.loss
        self.module.loss = lambda outputs, number: loss(outputs, labels[int(number)])
        try:
            return batch(*inputs, targets=numbers)
        finally:
            self.module.loss = own

    # -- what a pipeline cannot do ------------------------------------------------------------------------

    forward = _refused("forward")
    backward = _refused("backward")
    step = _refused("step")
    no_sync = _refused("no_sync")
    coalesce_grad_reduction = _refused("coalesce_grad_reduction")
    set_gradient_accumulation_boundary = _refused("set_gradient_accumulation_boundary")

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> NoReturn:
        raise DeepSpeedFeatureError(
            "full weights: no rank of a pipeline has them. Call save_checkpoint, then 'zero-ext export'."
        )

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # -- checkpoints --------------------------------------------------------------------------------------

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """See the base class; a checkpoint may come from another number of stages too."""
        found = super().load_checkpoint(*args, **kwargs)
        data = self.data_iterator
        if isinstance(data, RepeatingLoader) and data.loader is self.training_dataloader:
            self.data_iterator = None  # the next one goes on where the loader does now
        return found


def micro_batches_of(
    data: Iterator[Any] | None, count: int, batch_fn: Callable[[Any], Any] | None
) -> list[tuple[Any, Any]]:
    """Return the next ``count`` pairs of inputs and labels, which ``batch_fn``, if given, makes of what
    ``data`` yields. ``ValueError`` for data that ends before, ``TypeError`` for what is no iterator or no
    pair.
    """
    if data is None:
        raise ValueError("data: expected an iterator, got none. Pass it, or training_data to initialize.")
    if not hasattr(data, "__next__"):
        raise TypeError(
            f"data: expected an iterator, got {type(data).__name__}. Pass iter(loader), or "
            "iter(deepspeed.utils.RepeatingLoader(loader))."
        )
    pairs: list[tuple[Any, Any]] = []
    while len(pairs) < count:
        try:
            found = next(data)
        except StopIteration:
            raise ValueError(
                f"data: expected {count} micro-batches, got {len(pairs)} before the iterator ended. Wrap the "
                "loader in deepspeed.utils.RepeatingLoader, which begins again at its end."
            ) from None
        if batch_fn is not None:
            found = batch_fn(found)
        if not isinstance(found, (tuple, list)) or len(found) < 2:
            raise TypeError(
                f"micro-batch: expected a pair of inputs and labels, got {type(found).__name__}. Make one "
                "with set_batch_fn."
            )
        pairs.append((found[0], found[1]))
    return pairs


def joined(micro_batches: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of micro-batches, a tensor or several each, one behind the other.

    ``TypeError`` for other things than tensors [samples, ...], ``ValueError`` for other shapes in one than in
    the first.
    """
    inputs = [tuple(each) if isinstance(each, (tuple, list)) else (each,) for each in micro_batches]
    for value in (value for values in inputs for value in values):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            what = "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"inputs: expected tensors [samples, ...], got {what}. Convert them.")
    shapes = [[tuple(value.shape) for value in values] for values in inputs]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"inputs of micro-batch {number}: expected shapes {shapes[0]} as of the first, got {shape}. "
                "Drop the last samples of a loader, or pad them."
            )
    return tuple(torch.cat(column) for column in zip(*inputs, strict=True))
