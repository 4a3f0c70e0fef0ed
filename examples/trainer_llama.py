"""Train a small Llama on real text with Hugging Face's Trainer and ZeRO-3, without any download.

    python examples/trainer_llama.py
    torchrun --nproc-per-node 2 examples/trainer_llama.py [--ci] [--zero FILE.json] [--out FOLDER]

The script trains a byte-level Llama with random weights on the docstrings of Python's standard library. It
stops half-way and resumes from the checkpoint. Then it saves the model in the format of transformers, loads
it with `from_pretrained` directly into shards, and generates some text. Only two lines differ from a script
without zero_ext: the import and `zero_config=`. `--ci` does the same with a smaller model in under 40
seconds. The exit status is 1 if the held-out loss does not fall below the byte-unigram entropy (`--ci`: below
its start), or if the loaded model has a different one.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from demo.corpus import STANDARD_LIBRARY, ByteWindows, Corpus, gather_corpus, unigram_entropy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from zero_ext.integrations.transformers import ZeroTrainer, from_pretrained  # zero_ext

LENGTH = 128
PROMPT = "Return the "
SIZES = {
    False: {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4},
    True: {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
}
STEPS = {False: 160, True: 24}
SAMPLES_A_STEP = 16


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte. Token 0 marks the end of a text."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}
    vocabulary = {character: byte_of[character] for character in characters}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next(character for character, byte in byte_of.items() if byte == 0)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def arguments(folder: Path, quick: bool) -> TrainingArguments:
    """Return the Trainer's arguments, which also set batch sizes, learning rate and clipping of ZeRO."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps = STEPS[quick]
    return TrainingArguments(
        str(folder),
        use_cpu=not torch.cuda.is_available(),
        bf16=not quick,
        max_steps=steps,
        per_device_train_batch_size=SAMPLES_A_STEP // ranks,
        per_device_eval_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=steps // 2,
        save_strategy="steps",
        save_steps=steps // 2,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=steps // 8,
        report_to=[],
        disable_tqdm=True,
    )


class StopMidway(TrainerCallback):
    """Callback that ends the first run at its checkpoint, as a time limit would."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def command_line() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Hugging Face's Trainer and ZeRO-3")
    parser.add_argument("--ci", action="store_true", help="train a smaller model for fewer steps")
    parser.add_argument("--zero", help="configuration file, native or DeepSpeed JSON (default: stage 3)")
    parser.add_argument("--out", type=Path, default=Path("runs") / "trainer-llama")
    return parser.parse_args()


def main() -> int:
    options = command_line()
    zero_config = options.zero or {"stage": 3}
    args = arguments(options.out, options.ci)
    with args.main_process_first(desc="gathering text"):
        if args.process_index == 0:
            for earlier in options.out.glob("checkpoint-*"):
                shutil.rmtree(earlier)
            gather_corpus(STANDARD_LIBRARY / ("asyncio" if options.ci else "")).write(options.out)
    corpus = Corpus.read(options.out)
    data, unseen = ByteWindows(corpus.training, LENGTH), ByteWindows(corpus.held_out, LENGTH)
    held_out = torch.utils.data.Subset(unseen, range(0, len(unseen), 20))
    tokenizer = byte_tokenizer()

    def trainer(model: Any, **settings: Any) -> ZeroTrainer:
        return ZeroTrainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=held_out,
            processing_class=tokenizer,
            zero_config=zero_config,  # zero_ext
            **settings,
        )

    def fresh() -> LlamaForCausalLM:
        set_seed(args.seed)
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                **ids,
                **SIZES[options.ci],
            )
        )

    first = trainer(fresh(), callbacks=[StopMidway()])
    start = first.evaluate()["eval_loss"]
    first.train()
    second = trainer(fresh())
    second.train(resume_from_checkpoint=True)
    end = second.evaluate()["eval_loss"]
    second.save_model(str(options.out / "model"))

    again = from_pretrained(LlamaForCausalLM, options.out / "model", zero_config)
    read = trainer(again).evaluate()["eval_loss"]
    again.eval()
    inputs = tokenizer(PROMPT, return_tensors="pt").to(args.device)
    text = tokenizer.decode(again.generate(**inputs, max_new_tokens=60, do_sample=False)[0])

    bound = unigram_entropy(corpus.held_out)
    enough = end < (start if options.ci else bound) and math.isclose(read, end, rel_tol=1e-2)
    if args.process_index == 0:
        print(f"\n{text!r}\n")
        print(f"held-out loss {start:.3f} -> {end:.3f} nats per byte, {read:.3f} after loading")
        print(f"byte-unigram entropy {bound:.3f} nats per byte")
        print(f"saved for from_pretrained: {options.out / 'model'}")
        print("ok" if enough else "FAILED: the loss did not fall far enough, or saving changed it")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
