"""Fine-tunes LoRA adapters over a base model that ZeRO-3 shards, offline, with TRL and PEFT.

`torchrun --nproc-per-node 2 examples/sft_lora_zero3.py [--folder FOLDER] [--ci]` takes under three minutes
on two cores and exits with 1 if a promise is broken. A byte-level Llama first learns from docstrings of half
of the standard library, sharded over the ranks; then adapters learn, from the other half, to say what a
function does when given its name, while the frozen base lies in host memory. Held-out loss must fall, and
plain PEFT must read the adapter to the same logits. `--ci` does a tenth of the steps on a quarter
of the text, with a smaller model.
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
    """Name and first line of documentation of the standard library's functions and classes; ``quick`` reads
    every fourth module."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:: 4 if quick else 1]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                if lines and len(lines[0]) > 10:
                    found.append({"prompt": f"{path.stem}.{node.name}: ", "completion": lines[0]})
    return found


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and two more for padding and end."""
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def random_model(tokens: int, quick: bool) -> LlamaForCausalLM:
    """Half a million parameters, ``quick`` a fifth of that; the same on all ranks."""
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
    """On the CPU, in fp32, with a line of progress every tenth of the way."""
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
    """The base model, from random weights; written as ``from_pretrained`` reads it."""
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
    """Adapters over the sharded base; returns the promises that were broken."""
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
        print(
            f"a rank holds {state['params']:,} bytes of parameters, {state['optimizer']:,} of optimizer state"
        )
        print(f"the adapter has {size:,} bytes; plain PEFT's logits differ by {apart:.1e} at most")
    broken = []
    if not after < before:
        broken.append(f"held-out loss did not fall: {before} before, {after} after")
    if not apart < 1e-4:
        broken.append(f"logits of plain PEFT differ by {apart}")
    return broken


def main() -> int:
    """Both runs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "sft-lora")
    parser.add_argument("--ci", action="store_true", help="a tenth of the steps, a smaller model, less text")
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
