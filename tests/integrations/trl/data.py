"""A tokenizer and data without a network, for TRL's trainers."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("red", "green", "blue", "small", "large", "cat", "dog", "bird", "runs", "sleeps", "eats", "here")
disable_progress_bars()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and padding, end and unknown."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(count: int, seed: int) -> Dataset:
    """Texts of 4 to 9 words."""
    draw = random.Random(seed)
    return Dataset.from_list(
        [{"text": " ".join(draw.choices(WORDS, k=draw.randint(4, 9)))} for _ in range(count)]
    )


def preferences(count: int, seed: int) -> Dataset:
    """Prompts with a chosen and a rejected answer."""
    draw = random.Random(seed)

    def some(least: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, least + 3)))

    rows: list[dict[str, Any]] = [
        {"prompt": some(2), "chosen": " " + some(2), "rejected": " " + some(1)} for _ in range(count)
    ]
    return Dataset.from_list(rows)
