"""PEFT's own way to DeepSpeed, under the one that is installed and under this project's DeepSpeed API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import BartConfig, BartForConditionalGeneration, LlamaForCausalLM

from tests.integrations.deepspeed.test_scripts import under_import_alias, under_real
from tests.integrations.launch import found_in
from tests.integrations.peft.models import base

SCRIPT = Path(__file__).parent / "scripts" / "adapters.py"
CASES = ("bart", "llama", "dora", "pissa", "whole")  # the last one trains without adapters
# What 'accelerate launch' makes of the example's file, with weights that are sharded as they are loaded.
ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
# DeepSpeed would have to compile its optimizer for it.
OFFLOAD = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """What each implementation wrote, which was started once."""
    start = tmp_path_factory.mktemp("start")
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    config = BartConfig(
        **layers,
        **heads,
        **ids,
        d_model=32,
        dropout=0.0,
        decoder_start_token_id=2,
        max_position_embeddings=64,
    )
    base(0).save_pretrained(start / "llama")
    torch.manual_seed(0)
    BartForConditionalGeneration(config).save_pretrained(start / "bart")
    found = {}
    for name, run, more in (("real", under_real, {}), ("ours", under_import_alias, OFFLOAD)):
        found[name] = tmp_path_factory.mktemp(name)
        run(str(SCRIPT), start, found[name], *CASES, **ENVIRONMENT, **more)
    yield {"start": start, **found}


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_generate_and_save_alike(folders: dict[str, Path], case: str) -> None:
    own, theirs = (found_in(folders[name])[case] for name in ("ours", "real"))
    assert len(own["losses"]) == 8 and own["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert own["generated"] == theirs["generated"] and own["engine"] != theirs["engine"]
    file = "model.safetensors" if case == "whole" else "adapter_model.safetensors"
    weights = [load_file(folders[name] / case / file) for name in ("ours", "real")]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-5)
    # As the example saves, on every rank and without gathering, DeepSpeed writes tensors without elements.
    again = load_file(folders["ours"] / f"{case}-by-every-rank" / file)
    assert again.keys() == weights[0].keys()
    assert all(torch.equal(again[name], value) for name, value in weights[0].items())


def test_saved_adapters_load_in_plain_peft(folders: dict[str, Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(folders["start"] / "llama")
    adapted = PeftModel.from_pretrained(model, folders["ours"] / "llama").eval()
    prompt, tokens = found_in(folders["ours"])["llama"]["prompts"], 5
    for ids, wanted in zip(prompt, found_in(folders["ours"])["llama"]["generated"], strict=True):
        made = adapted.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=tokens)
        assert made[0].tolist() == wanted[: made.shape[1]]
