"""TRL's own trainers under the DeepSpeed that is installed and under this project's DeepSpeed API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.integrations.deepspeed.test_scripts import under_import_alias, under_real
from tests.integrations.launch import found_in
from tests.integrations.trl.data import preferences, sentences, tokenizer

SCRIPT = Path(__file__).parent / "scripts" / "trainers.py"
CASES = (
    *("sft-2", "sft-lora-3", "dpo-3", "dpo-sync-3", "dpo-precompute-3", "kto-precompute-3", "reward-3"),
    *("rloo-judge-3", "grpo-2", "grpo-3", "grpo-lora-3", "grpo-judge-3", "grpo-evaluate-3"),
)
UNGATHERED = "grpo-ungathered-3"  # generates sharded, in whose backward DeepSpeed 0.19 finds no values
# A difference of two rounded sums has no relative precision of its own.
SMALL = {"loss": 1e-6, "kl": 1e-6, "rewards/margins": 1e-6}
KEYS = ("loss", "grad_norm", "logps/chosen", "rewards/margins", "reward", "kl", "completions/mean_length")


def inputs_in(folder: Path) -> Path:
    """Tiny models, their tokenizer and data as files, which ranks share."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**sizes, **ids, num_key_value_heads=2, max_position_embeddings=64, num_labels=1)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer().save_pretrained(folder / name)
    sentences(24, 5).save_to_disk(folder / "sentences")
    paired = preferences(24, 5)
    paired.save_to_disk(folder / "preferences")
    rows = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in paired
        for kind in ("chosen", "rejected")
    ]
    Dataset.from_list(rows).save_to_disk(folder / "unpaired")
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each implementation computed, case by case; each was started once."""
    results = {}
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    for name, run, cases in (("real", under_real, CASES), ("ours", under_import_alias, (*CASES, UNGATHERED))):
        folder = tmp_path_factory.mktemp(name)
        start = inputs_in(folder / "start")
        run(str(SCRIPT), start, folder, *cases, **environment)
        results[name] = found_in(folder)
    yield results


def check_alike(own: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert len(own["history"]) == len(theirs["history"]) > 0
    for step, wanted in zip(own["history"], theirs["history"], strict=True):
        assert step.keys() >= {"loss"} and step.keys() == wanted.keys()
        for key in step.keys() & set(KEYS):
            assert step[key] == pytest.approx(wanted[key], rel=1e-5, abs=SMALL.get(key, 0.0)), key


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_trains_alike(found: dict[str, dict[str, Any]], case: str) -> None:
    own, theirs = found["ours"][case], found["real"][case]
    check_alike(own, theirs)
    history = own["history"]
    if "evaluate" not in case:
        assert len(history) == 3 and len({step["grad_norm"] for step in history}) == 3
    if "grpo" in case:  # ranks sampled, and completions ended where they liked
        assert all(0 < step["completions/mean_length"] < 12 for step in history)


def test_ranks_generate_lengths_of_their_own(found: dict[str, dict[str, Any]]) -> None:
    for case in ("grpo-2", "grpo-3"):
        (own, logits), (theirs, wanted) = (found[name][case]["generated"] for name in ("ours", "real"))
        assert own == theirs
        assert own[0][5:] == [0] * 5 and own[1][:3] == own[0][:3]  # 2 new tokens on rank 0, 7 on rank 1
        assert logits == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_generation_without_gathered_weights(found: dict[str, dict[str, Any]]) -> None:
    check_alike(found["ours"][UNGATHERED], found["ours"]["grpo-3"])
