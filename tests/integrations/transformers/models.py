"""Tiny models with random weights, data, and runs of a Trainer that two sides repeat alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from tests.multi.rank import World

VOCABULARY = 64
TIME = 12


def enter(world: World) -> None:
    """Sets what a launcher sets, so that TrainingArguments sees the ranks of ``world``."""
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    transformers.trainer.PrinterCallback = transformers.TrainerCallback  # nothing is printed


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """``count`` samples of random tokens, the last of which are not to be learnt; or with a class each."""

    def __init__(self, count: int, seed: int, labels: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCABULARY, (count, TIME), generator=generator)
        self.lengths = torch.randint(TIME // 2, TIME + 1, (count,), generator=generator)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, attended = self.ids[index], torch.arange(TIME) < self.lengths[index]
        if self.labels is not None:
            return {"input_ids": ids, "labels": ids.sum() % self.labels}
        return {"input_ids": ids, "labels": torch.where(attended, ids, -100)}


def llama(seed: int, **changes: Any) -> LlamaForCausalLM:
    """Two blocks, hidden 32, without dropout."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fixed = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**fixed, **sizes, **ids, **changes}))


def gpt2(seed: int, **changes: Any) -> GPT2LMHeadModel:
    """Two blocks, hidden 32, with dropout and tied embeddings."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **ids, **changes}))


def bert(seed: int, **changes: Any) -> BertForSequenceClassification:
    """A classifier with three labels."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(
        BertConfig(**{"vocab_size": VOCABULARY, "num_labels": 3, **sizes, **changes})
    )


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}


def arguments(folder: str | Path, **changes: Any) -> TrainingArguments:
    """On the CPU, silent, logging every step, saving nothing."""
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def fitted(kind: Any, model: Any, folder: str | Path, data: Any, config: Any = None, **settings: Any) -> Any:
    """A trainer of ``kind`` that has trained; ``config`` is for those of zero_ext."""
    more = {} if config is None else {"zero_config": config}
    trainer = kind(model=model, args=arguments(folder, **settings), train_dataset=data, **more)
    trainer.train()
    return trainer


def column(trainer: Trainer, name: str) -> list[float]:
    """What a trainer logged under ``name``, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def largest_difference(found: list[float], wanted: list[float]) -> float:
    """Relative to ``wanted``, over all places."""
    if len(found) != len(wanted) or not wanted:
        raise AssertionError(f"{len(found)} values, {len(wanted)} wanted, more than none")
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def reloaded(folder: str | Path, model: PreTrainedModel) -> PreTrainedModel:
    """What transformers alone reads from ``folder``."""
    return type(model).from_pretrained(folder).eval()
