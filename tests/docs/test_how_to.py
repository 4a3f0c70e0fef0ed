"""How-to pages that a reader follows command by command, and the keys that they name."""

from __future__ import annotations

import faulthandler
import json
import re
import signal
from pathlib import Path

import pytest
import torch

import zero_ext
from tests.docs.run_page import BLOCK, ROOT, follow
from tests.docs.snippets import snippets_of
from tests.integrations.transformers.models import VOCABULARY, llama
from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.base_section import key_paths

HOW_TO = ROOT / "docs" / "how_to"
CHOICE = HOW_TO / "choose_stage_and_tier.md"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
# Table 1 of arXiv 1910.02054: GB per rank of 7.5 billion parameters on 64 ranks, in stages 0 to 3.
PUBLISHED = [120, 31.4, 16.6, 1.88]


def test_fsdp2_and_zero_ext_train_alike(tmp_path: Path) -> None:
    first, second = re.findall(r"^loss .*$", follow("how_to/migrate_from_fsdp2.md", tmp_path), re.MULTILINE)
    assert first == second


def test_ranks_that_make_different_calls_end_as_the_page_says(tmp_path: Path) -> None:
    follow("how_to/debug_hang.md", tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "optimizer.step()) on rank 0. Make the same calls" in log or "square().mean()" in log


def test_stacks_are_printed_on_a_signal() -> None:
    with snippets_of("how_to/debug_hang.md") as page:
        page.run_next()
    assert faulthandler.unregister(signal.SIGUSR1)


def test_a_loss_in_chunks_is_the_same_loss(tmp_path: Path) -> None:
    printed = re.findall(
        r"^chunks of \d+ tokens: loss (.*)$", follow("how_to/long_sequences.md", tmp_path), re.M
    )
    assert len(printed) == 2 and printed[0] == printed[1]


def test_calls_for_long_sequences() -> None:
    words, positions = torch.randint(VOCABULARY, (1, 16)), torch.arange(16)[None] % 9
    with snippets_of("how_to/long_sequences.md") as page:
        names = page.run_next()
        alone = zero_ext.document_attention(
            *(names[each][:, :, :1000] for each in ("query", "key", "value")), [0, 1000]
        )
        torch.testing.assert_close(names["attended"][:, :, :1000], alone)
        page.run_next(model=llama(0), words=words, positions=positions)
        assert names["loss"].isfinite()
        block = page.run_next()["Block"](64)  # with its network in chunks
    hidden = torch.randn(2, 1500, 64)
    torch.testing.assert_close(block(hidden), hidden + block.network(hidden))


@pytest.mark.parametrize("page", ["long_sequences", "tune_performance"])
def test_configurations_of_a_page_load(page: str) -> None:
    found = [text for kind, _, text in BLOCK.findall((HOW_TO / f"{page}.md").read_text()) if kind == "json"]
    assert found
    for text in found:
        load_config(json.loads(text))


def test_keys_and_values_of_the_advice_on_performance_exist() -> None:
    text = (HOW_TO / "tune_performance.md").read_text()
    keys = set(re.findall(r"`((?:units|offload|communication|batch|activation_checkpointing)\.\w+)`", text))
    assert len(keys) >= 8 and keys <= set(key_paths(ZeroConfig))
    row = (HOW_TO / "monitoring.md").read_text()
    values = set(re.findall(r"`((?:time|wait|flops)/\w+)`", text))
    assert len(values) > 6 and {value for value in values if f"`{value}`" not in row} == set()


def test_bytes_of_the_stages_are_the_published_ones(tmp_path: Path) -> None:
    printed = follow("how_to/choose_stage_and_tier.md", tmp_path)
    computed = [
        float(text) for text in re.findall(r"^stage \d: ([\d.]+) GB per rank$", printed, re.MULTILINE)
    ]
    assert computed == pytest.approx(PUBLISHED, abs=0.05)
    table = re.findall(r"^\| \d \| .*? \| .*? \| ([\d.]+) GB \|", CHOICE.read_text(), re.MULTILINE)
    assert [float(text) for text in table] == pytest.approx(PUBLISHED, abs=0.05)
    assert load_config(tmp_path / "config.json").stage == 3


def test_configurations_of_the_decision_table_load() -> None:
    found = [json.loads(text) for text in re.findall(r"`(\{.*?\})`", CHOICE.read_text())]
    assert len(found) >= 9
    for mapping in found:
        load_config(mapping)


def test_keys_of_the_glossary_exist() -> None:
    keys = re.findall(r"Key: `(.*?)`", GLOSSARY.read_text())
    assert len(keys) > 5
    assert set(keys) <= set(key_paths(ZeroConfig))


def test_the_glossary_is_sorted() -> None:
    words = re.findall(r"^\| (.*?) \| ", GLOSSARY.read_text(), re.MULTILINE)[2:]
    assert len(words) > 20 and words == sorted(words, key=str.lower)
