"""Plans of mixtures of experts: parameters and FLOPs of transformers' models, bytes of their runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import zero_ext
from tests.integrations.transformers.models import enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import apply_expert_parallel, make_mesh
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.simulation import MACHINES, Training
from zero_ext.plan.simulation.run_memory import state_needs
from zero_ext.plan.simulation.simulate import sent_in_step, tokens_sent
from zero_ext.zero import engine_of

STATE = ("params", "grads", "optimizer")
MACHINE = MACHINES["dgx-a100"].replace(name="tests", device_is_host=True)
LENGTH = 16
# Multiples of 32 elements, so that tensors need no padding.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 8),
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24}
DEEPSEEK = {**LATENT, "v_head_dim": 16, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "mlp_only_layers": [1]}),
    "qwen3_moe, biases": ("qwen3_moe", {"head_dim": 32, "attention_bias": True}),
    "olmoe": ("olmoe", {}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 2}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 1, "n_shared_experts": 2}),
}


def config_of(family: str) -> PretrainedConfig:
    kind, own = FAMILIES[family]
    known = AutoConfig.for_model(kind)
    fixed = {name for name in SIZES if isinstance(getattr(type(known), name, None), property)}
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name) and name not in fixed}
    config = AutoConfig.for_model(kind, **{**sizes, **own})
    config._experts_implementation = "eager"
    return config


def active_parameters(model: nn.Module, config: PretrainedConfig) -> int:
    """All, but of the stacks of experts those of the experts that a token is sent to."""
    found = 0
    for name, parameter in model.named_parameters():
        experts = config.num_experts_per_tok if ".experts." in name else 1
        found += parameter.numel() * experts // (parameter.shape[0] if ".experts." in name else 1)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    planned = model_named(str(tmp_path))
    assert planned.parameters == planned.full_cost.parameters == model.num_parameters()
    assert planned.active_parameters == active_parameters(model, config) < planned.parameters
    for ep in (2, 4, 8):
        spread = planned.with_experts_over(ep)
        experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
        assert spread.full_cost.parameters == planned.parameters - experts + experts // ep
        groups = sum(group.elements for group in spread.full_cost.tensor_groups)
        assert groups == spread.full_cost.parameters
        assert (spread.parameters, spread.active_parameters) == (
            planned.parameters,
            planned.active_parameters,
        )


@pytest.mark.parametrize(
    ("kind", "changes", "parameters", "active"),
    [  # Mixtral 8x7B, OLMoE-1B-7B and DeepSeek-V3, as their makers count them
        ("mixtral", {}, 46_702_792_704, 12_879_925_248),
        ("olmoe", {"intermediate_size": 1024}, 6_919_161_856, 1_281_951_744),
        ("deepseek_v3", {}, 671_026_404_352, 37_552_000_000),
    ],
)
def test_published_models_have_their_parameters(
    kind: str, changes: dict[str, int], parameters: int, active: int, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, **changes).save_pretrained(tmp_path)
    planned = model_named(str(tmp_path))
    assert planned.parameters == parameters
    assert planned.active_parameters == pytest.approx(active, rel=1e-3)


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_a_forward(family: str, ep: int, tmp_path: Path) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    planned = model_named(str(tmp_path), LENGTH).with_experts_over(ep).full_cost
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(2 * LENGTH).view(2, LENGTH))
    flops = 2 * LENGTH * sum(unit.forward_flops for unit in planned.units)
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.01)


class Exchanges:
    """Counts the bytes of rows that this rank sends, those to itself included, by exchange."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._plain = dist.all_to_all_single

    def __call__(self, output: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():  # and not the numbers of rows
            self.sent.append(rows.nbytes)
        return self._plain(output, rows, *args, **kwargs)


@on_ranks(4)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_bytes_are_those_of_a_run(world: World, family: str) -> None:
    """State of a rank, what its collectives send, and the tokens that all ranks exchange."""
    enter(world)
    seed = random.Random(world.seed).randrange(10**6)
    config = config_of(family)
    folder = world.shared_folder()
    if world.rank == 0:
        config.save_pretrained(folder)
    world.barrier()
    planned = model_named(str(folder), LENGTH)
    for ep, stage, steps in ((1, 3, 1), (2, 3, 1), (4, 3, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)):
        assert_planned(world, planned.with_experts_over(ep), config, stage, steps, seed)


def assert_planned(
    world: World, planned: ModelSpec, config: PretrainedConfig, stage: int, micro_batches: int, seed: int
) -> None:
    torch.manual_seed(seed)
    mesh = make_mesh(ep=planned.ep_size, device_type="cpu")
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    model = apply_expert_parallel(model, mesh)
    settings = {
        "stage": stage,
        "precision": {"dtype": "bf16"},
        "batch": {"micro_batch_size": 1, "gradient_accumulation_steps": micro_batches},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero_ext.prepare(model, optimizer, settings, process_group=mesh)
    for _ in range(2):
        exchanges = Exchanges()
        with mock.patch.object(dist, "all_to_all_single", exchanges):
            for _ in range(micro_batches):
                words = torch.randint(3, config.vocab_size, (1, LENGTH))
                model.backward(model(words, labels=words).loss)
        optimizer.step()
        optimizer.zero_grad()
    case = f"ep {planned.ep_size}, stage {stage}, seed {seed}"
    engine, cost = engine_of(model), planned.full_cost
    training = Training.of_config(settings, world.size)
    needs, held = state_needs(cost, training, MACHINE).device, engine.memory_breakdown()
    for kind in STATE:
        assert needs[kind] == pytest.approx(held[kind], rel=0.005), (case, kind)
    policy = zero_ext.config.CommunicationConfig()
    tokens = tokens_sent(cost, training).all
    sent = sum(count for kind, count in engine.traffic.last_bytes_sent.items() if kind != "scalars")
    assert sent_in_step(cost, training, policy).all - tokens == pytest.approx(sent, rel=0.005), case
    mixtures = sum(group.experts != () for group in cost.tensor_groups)
    assert len(exchanges.sent) == (4 * micro_batches * mixtures if planned.ep_size > 1 else 0), case
    rows = sum(world.everyone(sum(exchanges.sent)))
    share = (planned.ep_size - 1) / planned.ep_size  # that goes to other ranks where experts are equally busy
    assert tokens * world.size == round(rows * share), case
