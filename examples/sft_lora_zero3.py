"""Fine-tune LoRA adapters on a base model that ZeRO-3 shards, with TRL and PEFT, without any download.

`torchrun --nproc-per-node 2 examples/sft_lora_zero3.py [--folder FOLDER] [--ci]` takes under three minutes on
two cores. It exits with status 1 if a check fails. First, a byte-level Llama is trained from scratch on the
docstrings of half of the standard library, sharded across the ranks. Then LoRA adapters are trained on the
other half to complete the name of a function with a description, while the frozen base is offloaded to host
memory. The held-out loss must fall, and plain PEFT must load the adapter and compute the same logits. `--ci`
runs a tenth of the steps on a quarter of the text, with a smaller model.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from zero_ext.integrations.trl import ZeroSFTTrainer
from zero_ext.zero import engine_of

LONGEST = 160
STAGE_3: dict[str, Any] = {"stage": 3}
BASE_ON_HOST: dict[str, Any] = {"stage": 3, "offload": {"params": "host"}}


def documented(quick: bool) -> list[dict[str, str]]:
    """Return the name and the first docstring line of the standard library's functions and classes.

    Args:
        quick: Read only every fourth module.
    """
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:: 4 if quick else 1]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                if lines and len(lines[0]) > 10:
                    found.append({"prompt": f"{path.stem}.{node.name}: ", "completion": lines[0]})
    return found


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, one for padding and one for the end."""
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def random_model(tokens: int, quick: bool) -> LlamaForCausalLM:
    """Return a Llama of half a million parameters (``quick``: a fifth of that), the same on all ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens,
            hidden_size=64 if quick else 96,
            intermediate_size=176 if quick else 256,
            num_hidden_layers=2 if quick else 4,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def settings(folder: Path, steps: int, learning_rate: float) -> SFTConfig:
    """Return arguments for training on the CPU in fp32 that log ten times per run."""
    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        max_length=LONGEST,
        logging_steps=max(1, steps // 10),
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        seed=0,
    )


def train_base(folder: Path, rows: list[dict[str, str]], steps: int, quick: bool) -> None:
    """Train the base model from random weights and save it in the format that ``from_pretrained`` loads."""
    words = byte_tokenizer()
    trainer = ZeroSFTTrainer(
        model=random_model(len(words), quick),
        args=settings(folder, steps, 3e-3),
        train_dataset=Dataset.from_list([{"text": row["prompt"] + row["completion"]} for row in rows]),
        processing_class=words,
        zero_config=STAGE_3,
    )
    trainer.train()
    trainer.save_model(str(folder))


def train_adapter(base: Path, folder: Path, rows: list[dict[str, str]], steps: int) -> list[str]:
    """Train adapters on the sharded base and return a message for each failed check."""
    trainer = ZeroSFTTrainer(
        model=LlamaForCausalLM.from_pretrained(base),
        args=settings(folder, steps, 1e-2),
        train_dataset=Dataset.from_list([row for number, row in enumerate(rows) if number % 10]),
        eval_dataset=Dataset.from_list(rows[::10][:64]),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        zero_config=BASE_ON_HOST,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder))
    state = engine_of(trainer.model).memory_breakdown()
    ids = torch.tensor([list(range(2, 66))])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits
        plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
        apart = (plain(input_ids=ids).logits - logits).abs().max().item()
    if trainer.is_world_process_zero():
        size = (folder / "adapter_model.safetensors").stat().st_size
        print(f"held-out loss {before:.3f} before, {after:.3f} after {steps} steps")
        print(f"bytes per rank: {state['params']:,} of parameters, {state['optimizer']:,} of optimizer state")
        print(f"the adapter has {size:,} bytes, the logits of plain PEFT differ by at most {apart:.1e}")
    broken = []
    if not after < before:
        broken.append(f"held-out loss: expected below {before} (before training), got {after}")
    if not apart < 1e-4:
        broken.append(f"logits of plain PEFT: expected a difference below 1e-4, got {apart}")
    return broken


def main() -> int:
    """Train the base model and the adapters, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "sft-lora")
    parser.add_argument("--ci", action="store_true", help="fewer steps, a smaller model and less text")
    options = parser.parse_args()
    disable_progress_bars()
    steps = 15 if options.ci else 150
    rows = documented(options.ci)
    half = len(rows) // 2
    train_base(options.folder / "base", rows[:half], 2 * steps, options.ci)
    broken = train_adapter(options.folder / "base", options.folder / "adapter", rows[half:], steps)
    for line in broken:
        print(f"FAILED: {line}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
