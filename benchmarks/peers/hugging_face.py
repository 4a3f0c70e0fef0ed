"""Hugging Face's Trainer, with zero_ext's mixin or with DeepSpeed, made to go a step at a time."""

import tempfile
import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, training_args

from benchmarks.harness.shapes import BATCH_SIZE, Shape, batch_for, build_model
from benchmarks.peers.base import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, adamw
from benchmarks.peers.zero_ext_engine import configuration, norm_of
from zero_ext.integrations.transformers import ZeroTrainer

STEPS = 1_000_000


class HuggingFaceTrainer:
    """``Trainer.train`` in a thread of its own, which waits before each step until it is asked for one.

    The model, the optimizer, the configuration and the tokens are those of zero_ext's or DeepSpeed's own
    loop. A step begins before its batch is fetched, which is a collective, and ends where the next one would
    begin.
    """

    def __init__(self, shape: Shape, stage: int) -> None:
        model = build_model(shape)
        settings = {
            "model": model,
            "optimizers": (adamw(list(model.parameters())), None),
            "zero_config": configuration(stage, 0, False, "fp32", {}),
        }
        self._prepare(_StepwiseZeroTrainer, shape, settings, use_cpu=True)

    def _prepare(self, kind: Any, shape: Shape, settings: dict[str, Any], **arguments: Any) -> None:
        """Make the Trainer ``kind`` with ``settings``, its ``TrainingArguments`` with ``arguments``."""
        self._folder = tempfile.TemporaryDirectory(prefix="zero_ext_bench_trainer_")
        args = TrainingArguments(
            self._folder.name,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH_SIZE,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP_NORM,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **arguments,
        )
        self._turns = _Turns()
        # With DeepSpeed on CPUs, Accelerate counts one process. Then every rank gets all samples.
        first = dist.get_rank() if args.world_size == 1 < dist.get_world_size() else 0
        tokens, callbacks = _Tokens(shape, args.world_size, first), [_Stop(self._turns)]
        self._trainer = kind(args=args, train_dataset=tokens, callbacks=callbacks, **settings)
        self._trainer.turns = self._turns
        self._thread = threading.Thread(target=self._train, name="Trainer", daemon=True)

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._turns.error = error
        self._turns.done.release()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next step; the data set gives the Trainer the same ``tokens``."""
        if self._thread.ident is None:
            self._thread.start()
        self._turns.go.release()
        self._turns.done.acquire()
        if self._turns.error is not None:
            raise RuntimeError("the Trainer stopped") from self._turns.error
        loss = self._trainer.last_loss
        if loss is None:
            raise RuntimeError("the Trainer ended before its first step")
        return loss

    def gradient_norm(self) -> float:
        return norm_of(self._trainer.model)

    def close(self) -> None:
        """Lets the Trainer end."""
        self._turns.ends = True
        self._turns.go.release()
        self._thread.join()
        self._folder.cleanup()


class DeepSpeedHuggingFaceTrainer(HuggingFaceTrainer):
    """The same with transformers' own DeepSpeed, by the JSON of DeepSpeed's loop."""

    def __init__(self, shape: Shape, stage: int, settings: Mapping[str, Any] | None = None) -> None:
        from benchmarks.peers.deepspeed_zero import configuration as json_of

        json = json_of(stage, settings=settings)
        # Without use_cpu transformers wants a GPU for bfloat16. With it Accelerate leaves DeepSpeed out.
        with mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True):
            self._prepare(_StepwiseTrainer, shape, {"model": build_model(shape)}, deepspeed=json, bf16=True)

    def gradient_norm(self) -> float:
        return float(self._trainer.model_wrapped.get_global_grad_norm())


class _Turns:
    """Two threads that take turns: ``go`` for one step, ``done`` when it is over."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.ends = False
        self.error: BaseException | None = None


class _Stop(TrainerCallback):
    """Ends the training once the turns are over."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self._turns.ends


class _StepwiseTrainer(Trainer):
    """Waits for its turn before each step, and keeps the last loss."""

    turns: _Turns
    last_loss: torch.Tensor | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.last_loss is not None:
            self.turns.done.release()
        self.turns.go.acquire()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class _StepwiseZeroTrainer(_StepwiseTrainer, ZeroTrainer):
    """The same with zero_ext."""


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sample ``step * ranks + rank`` is what ``step`` of the rank ``first + rank`` trains on."""

    def __init__(self, shape: Shape, ranks: int, first: int) -> None:
        self._shape, self._ranks, self._first = shape, ranks, first

    def __len__(self) -> int:
        return STEPS * self._ranks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = batch_for(self._shape, self._first + index % self._ranks, index // self._ranks)[0]
        return {"input_ids": tokens, "labels": tokens}
