"""A Trainer script as people write it, which knows nothing of zero_ext."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", action="store_true")
    own, rest = parser.parse_known_args()
    kind = TrainingArguments
    if own.trl:
        from trl import SFTConfig, SFTTrainer

        kind = SFTConfig
    (arguments,) = HfArgumentParser(kind).parse_args_into_dataclasses(rest)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **sizes, pad_token_id=0))
    ids = torch.randint(1, 16, (40, 12)).tolist()
    if own.trl:
        from tests.integrations.trl.data import tokenizer

        data = Dataset.from_dict({"input_ids": ids})
        trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())
    else:
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data.select(range(8)))
    trainer.train()
    if not own.trl:
        trainer.evaluate()
    trainer.save_model(str(own.folder / "model"))
    if trainer.is_world_process_zero():
        engine = vars(model).get("_zero_ext_engine")
        found = {
            "history": [
                {key: value for key, value in row.items() if "loss" in key}
                for row in trainer.state.log_history
            ],
            "stage": None if engine is None else engine.config.stage,
            "saved": sorted(path.name for path in (own.folder / "model").iterdir()),
        }
        (own.folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
