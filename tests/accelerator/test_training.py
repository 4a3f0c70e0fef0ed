"""Models train on the device as they do on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,  # devices draw one mask of dropout in another kernel than the CPU
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}


def losses(
    model_name: str, device: str, dtype: torch.dtype, seed: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of five steps and the parameters after them."""
    torch.manual_seed(seed)
    config = CONFIGS[model_name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    draws = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(5):
        tokens = torch.randint(0, 97, (2, 16), generator=draws).pin_memory().to(device, non_blocking=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_name", list(CONFIGS))
@on_ranks(1, stand_in=True)
def test_losses_are_the_cpus(world: World, model_name: str, dtype: str) -> None:
    cpu, cpu_parameters = losses(model_name, "cpu", getattr(torch, dtype), world.seed)
    device, device_parameters = losses(model_name, "stand_in", getattr(torch, dtype), world.seed)
    assert device == cpu
    for one, other in zip(device_parameters, cpu_parameters, strict=True):
        assert torch.equal(one, other)
