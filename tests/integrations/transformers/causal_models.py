"""Tiny causal language models of any family of transformers, and batches with each form of labels."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import zero_ext
from tests.integrations.transformers.beside_one_process import optimizer_of
from tests.integrations.transformers.models import TIME, VOCABULARY
from tests.multi.rank import World

ROWS = 2


def model_of(name: str, seed: int, **changes: Any) -> Any:
    """Two blocks, hidden 32, without dropout."""
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{name}ForCausalLM")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
    fixed = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return kind(kind.config_class(**{**fixed, **sizes, **ids, **changes}))


def batches(world: World) -> list[dict[str, Any]]:
    """One for each form of labels: all counted, some ignored with their number, and shifted ones."""
    draw = torch.Generator().manual_seed(world.seed)
    words = torch.randint(3, VOCABULARY, (3, ROWS * world.size, TIME), generator=draw)
    some = torch.where(torch.rand(words[1].shape, generator=draw) < 0.6, words[1], -100)
    number = (some[:, 1:] != -100).sum()
    shifted = words[2].roll(-1, 1)
    return [
        {"input_ids": words[0], "labels": words[0]},
        {"input_ids": words[1], "labels": some, "num_items_in_batch": number},
        {"input_ids": words[2], "labels": words[2], "shift_labels": shifted},
    ]


def own_rows(world: World, batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows; a number of items is that of a rank on average, as the Trainer passes it."""
    rows = slice(ROWS * world.rank, ROWS * (world.rank + 1))
    found = {key: value[rows] for key, value in batch.items() if value.dim()}
    if "num_items_in_batch" in batch:
        found["num_items_in_batch"] = batch["num_items_in_batch"] / world.size
    return found


def check_trains_as(
    world: World, model: Any, optimizer: Any, plain: Any, steps: list[list[dict[str, Any]]], case: str = ""
) -> None:
    """The ranks' ``model`` has the losses of ``plain`` on all rows and ends with its values. The batches of
    a step add up."""
    alone = optimizer_of(plain)
    for step in steps:
        for batch in step:
            loss, expected = model(**own_rows(world, batch)).loss, plain(**batch).loss
            loss.backward()
            expected.backward()
            mean = torch.tensor(world.everyone(float(loss.detach()))).mean()
            torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=0)
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    full = zero_ext.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-5, msg=f"{case}{name}")
