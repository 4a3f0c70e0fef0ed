"""Hugging Face's Trainer with zero_ext's mixin, made to go a step at a time."""

import tempfile
import threading
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from benchmarks.harness.shapes import BATCH_SIZE, Shape, batch_for, build_model
from benchmarks.peers.base import CLIP_NORM, adamw
from benchmarks.peers.zero_ext_engine import configuration
from zero_ext.integrations.transformers import ZeroTrainer
from zero_ext.zero import engine_of

STEPS = 1_000_000


class HuggingFaceTrainer:
    """``ZeroTrainer.train`` in a thread of its own, which waits before each step until it is asked for one.

    The model, the optimizer, the configuration and the tokens are those of zero_ext's own loop. A step
    begins before its batch is fetched, which is a collective, and ends where the next one would begin.
    """

    def __init__(self, shape: Shape, stage: int) -> None:
        model = build_model(shape)
        self._folder = tempfile.TemporaryDirectory(prefix="zero_ext_bench_trainer_")
        args = TrainingArguments(
            self._folder.name,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH_SIZE,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_NORM,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        self._turns = _Turns()
        self._trainer = _StepwiseTrainer(
            self._turns,
            model=model,
            args=args,
            train_dataset=_Tokens(shape, args.world_size),
            optimizers=(adamw(list(model.parameters())), None),
            zero_config=configuration(stage, 0, False, "fp32", {}),
            callbacks=[_Stop(self._turns)],
        )
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
        return float(engine_of(self._trainer.model).grad_norm)

    def close(self) -> None:
        """Lets the Trainer end."""
        self._turns.ends = True
        self._turns.go.release()
        self._thread.join()
        self._folder.cleanup()


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


class _StepwiseTrainer(ZeroTrainer):
    """Waits for its turn before each step, and keeps the last loss."""

    def __init__(self, turns: _Turns, **settings: Any) -> None:
        super().__init__(**settings)
        self._turns = turns
        self.last_loss: torch.Tensor | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.last_loss is not None:
            self._turns.done.release()
        self._turns.go.acquire()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sample ``step * ranks + rank`` is what that rank's ``step`` trains on."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        self._shape, self._ranks = shape, ranks

    def __len__(self) -> int:
        return STEPS * self._ranks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = batch_for(self._shape, index % self._ranks, index // self._ranks)[0]
        return {"input_ids": tokens, "labels": tokens}
