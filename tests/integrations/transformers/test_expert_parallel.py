"""Fused experts of transformers spread over ranks, under every ZeRO stage: as one process."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

import zero_ext
from tests.integrations.transformers.mixtures import (
    FAMILIES,
    LATENT,
    VOCABULARY,
    Maker,
    batches,
    losses_alone,
    mean_losses,
    mixture_of,
    muon_of,
    optimizer_of,
    routed_apart,
)
from tests.integrations.transformers.models import enter
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.parallel import apply_expert_parallel, expert_parallel, make_mesh
from zero_ext.parallel.experts import through_experts
from zero_ext.zero.units.dtensor_local import is_distributed, local_tensor

STEPS, CLIP = 3, 0.5
# Each stage with another number of ranks along "ep".
CASES = [(1, 4), (2, 2), (3, 4), (3, 2), (3, 1)]


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """All ranks, experts spread over ``ep`` of them; made once in a process."""
    return make_mesh(ep=ep, device_type="cpu")


def steps_of(
    world: World,
    made: nn.Module,
    mesh: DeviceMesh,
    config: dict[str, Any],
    words: list[torch.Tensor],
    make: Maker = optimizer_of,
) -> tuple[Any, list[float]]:
    """A prepared copy of a model after a step for each batch, and the means of the ranks' losses."""
    model = apply_expert_parallel(copy.deepcopy(made), mesh)
    model, optimizer = zero_ext.prepare(model, make(model), config, process_group=mesh)
    return model, mean_losses(world, model, optimizer, words)


def assert_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, shapes and values but for rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_full_values_are_those_of_one_process(world: World, family: str) -> None:
    enter(world)
    made = mixture_of(family, world.seed)
    words = routed_apart(made, world.seed, world.size, STEPS)
    alone = copy.deepcopy(made)
    expected = losses_alone(alone, words)
    for stage, ep in CASES:
        model, losses = steps_of(world, made, mesh_of(ep), {"stage": stage}, words)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=f"{stage}, {ep}, {world.seed}")
        assert_values(zero_ext.full_state_dict(model), alone.state_dict())


# What else is set in a run of Mixtral on two ranks along "ep": the configuration, and calls of the model.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"stage": 3, "gradient_clipping": CLIP}, {}),
    "host": ({"stage": 3, "offload": {"params": "host", "grads": "host", "optimizer": "host"}}, {}),
    "eager": ({"stage": 3}, {"set_experts_implementation": "eager"}),
    "batched": ({"stage": 2}, {"set_experts_implementation": "batched_mm"}),
    "checkpointed": ({"stage": 3}, {"gradient_checkpointing_enable": {"use_reentrant": False}}),
}


@on_ranks(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings_have_the_losses_of_one_process(world: World, variant: str) -> None:
    enter(world)
    config, calls = VARIANTS[variant]
    made, words = mixture_of("mixtral", world.seed), batches(world.seed, world.size, STEPS)
    alone = copy.deepcopy(made)
    expected = losses_alone(alone, words, config.get("gradient_clipping", float("inf")))
    for method, argument in calls.items():
        getattr(made, method)(argument)
    model, losses = steps_of(world, made, mesh_of(2), config, words)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=str(world.seed))
    assert_values(zero_ext.full_state_dict(model), alone.state_dict())


@on_ranks(2)
def test_split_parameters_have_the_attributes_of_full_ones(world: World) -> None:
    enter(world)
    model = mixture_of("gpt_oss", world.seed)
    for name, parameter in model.named_parameters():
        parameter.use_muon = "experts" not in name
    model = apply_expert_parallel(model, mesh_of(2))
    for name, parameter in model.named_parameters():
        assert parameter.use_muon is ("experts" not in name), name


@on_ranks(4)
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_muon_steps_the_matrices_of_each_expert(world: World, tier: str) -> None:
    enter(world)
    made, words = mixture_of("qwen3_moe", world.seed), batches(world.seed, world.size, STEPS)
    alone = copy.deepcopy(made)
    expected = losses_alone(alone, words, make=muon_of)
    assert any(each.dim() == 3 for each in muon_of(made).param_groups[0]["params"])
    folder = world.shared_folder()
    offload = {"optimizer": tier, "nvme_paths": [str(folder)]} if tier == "nvme" else {}
    for stage, ep in CASES:
        config = {"stage": stage, "offload": offload}
        model, losses = steps_of(world, made, mesh_of(ep), config, words, muon_of)
        where = f"{stage}, {ep}, {world.seed}"
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0, msg=where)
        for name, value in zero_ext.full_state_dict(model).items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=2e-3, msg=name)


@on_ranks(4)
def test_biases_of_experts_are_no_matrix_of_muons(world: World) -> None:
    enter(world)
    model = apply_expert_parallel(mixture_of("gpt_oss", world.seed), mesh_of(2))
    with pytest.raises(ValueError, match=r"proj_bias': expected a stack \[experts, m, n\] of matrices"):
        zero_ext.prepare(model, muon_of(model), {"stage": 2}, process_group=mesh_of(2))
    for name, parameter in model.named_parameters():
        parameter.use_muon = "bias" not in name and parameter.dim() > 1
    zero_ext.prepare(model, muon_of(model), {"stage": 2}, process_group=mesh_of(2))


@on_ranks(4)
def test_gradients_and_norms_are_those_of_one_process(world: World) -> None:
    enter(world)
    made, words = mixture_of("gpt_oss", world.seed), batches(world.seed, world.size, 1)[0]
    alone, model = copy.deepcopy(made), apply_expert_parallel(copy.deepcopy(made), mesh_of(2))
    alone(input_ids=words, labels=words).loss.backward()
    model, _ = zero_ext.prepare(model, optimizer_of(model), {"stage": 2}, process_group=mesh_of(2))
    own = words[world.rank, None]
    model(input_ids=own, labels=own).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(zero_ext.full_gradient(parameter), alone.get_parameter(name).grad)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in alone.parameters()])
    torch.testing.assert_close(float(model.clip_grad_norm_(1e9)), float(norm), rtol=1e-5, atol=0)


@on_ranks(4)
def test_a_checkpoint_moves_to_other_ranks_and_to_transformers(world: World) -> None:
    enter(world)
    made, words = mixture_of("qwen3_moe", world.seed), batches(world.seed, world.size, 2 * STEPS)
    alone = copy.deepcopy(made)
    losses_alone(alone, words[:STEPS])
    folder = world.shared_folder()
    model, _ = steps_of(world, made, mesh_of(2), {"stage": 3}, words[:STEPS])
    zero_ext.save_checkpoint(folder / "saved", model).wait()
    if world.rank == 0:
        zero_ext.checkpoint.export_huggingface(folder / "saved", folder / "exported")
        alone.config.save_pretrained(folder / "exported")
        loaded = type(alone).from_pretrained(folder / "exported")
        assert_values(loaded.state_dict(), alone.state_dict())
    for ep, stage in ((4, 1), (1, 3)):
        then = apply_expert_parallel(mixture_of("qwen3_moe", world.seed + 1), mesh_of(ep))
        then, _ = zero_ext.prepare(then, optimizer_of(then), {"stage": stage}, process_group=mesh_of(ep))
        zero_ext.load_checkpoint(folder / "saved", then)
        assert_values(zero_ext.full_state_dict(then), alone.state_dict())


@on_ranks(4)
def test_full_values_load_into_spread_experts(world: World) -> None:
    enter(world)
    model = apply_expert_parallel(mixture_of("mixtral", world.seed), mesh_of(4))
    model, _ = zero_ext.prepare(model, optimizer_of(model), {"stage": 3}, process_group=mesh_of(4))
    other = mixture_of("mixtral", world.seed + 1).state_dict()
    zero_ext.load_full_state_dict(model, other)
    for name, value in zero_ext.full_state_dict(model).items():
        assert torch.equal(value, other[name]), name


@on_ranks(4)
def test_a_rank_has_its_own_experts_alone(world: World) -> None:
    enter(world)
    made, mesh = mixture_of("gpt_oss", world.seed), mesh_of(2)
    model = apply_expert_parallel(copy.deepcopy(made), mesh)
    for name, parameter in model.named_parameters():
        full = made.get_parameter(name)
        chunk = full.chunk(2)[mesh["ep"].get_local_rank()] if ".experts." in name else full
        assert torch.equal(local_tensor(parameter), chunk), name


@on_ranks(4)
def test_copies_and_other_dtypes_have_experts_of_their_own(world: World) -> None:
    enter(world)
    made, words = mixture_of("mixtral", world.seed), batches(world.seed, world.size, STEPS)
    original = apply_expert_parallel(copy.deepcopy(made), mesh_of(2))
    model = copy.deepcopy(original)
    with torch.no_grad():
        for layer in original.model.layers:
            for parameter in layer.mlp.experts.parameters():
                local_tensor(parameter).zero_()
    expected = losses_alone(made, words)
    model = model.double().float()
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), {"stage": 3}, process_group=mesh_of(2))
    losses = mean_losses(world, model, optimizer, words)
    assert losses == pytest.approx(expected, rel=1e-5), world.seed
    assert_values(zero_ext.full_state_dict(model), made.state_dict())


@on_ranks(4)
def test_ranks_generate_in_step_where_experts_are_spread(world: World) -> None:
    """One rank ends after its first word. The others would wait for it in an exchange of tokens."""
    enter(world)
    made = mixture_of("mixtral", world.seed)
    words = torch.tensor([[3 + world.rank, 5]])
    first = int(made(input_ids=words).logits[0, -1].argmax())
    ends = first if world.rank == 0 else VOCABULARY + 1
    expected = made.generate(words, max_new_tokens=5, do_sample=False, eos_token_id=ends)
    for stage in (1, 3):
        model = apply_expert_parallel(copy.deepcopy(made), mesh_of(2))
        model, _ = zero_ext.prepare(model, optimizer_of(model), {"stage": stage}, process_group=mesh_of(2))
        with zero_ext.unsharded_for_generation(model):
            found = model.generate(words, max_new_tokens=5, do_sample=False, eos_token_id=ends)
        assert torch.equal(found[:, : expected.shape[1]], expected)


@on_ranks(4)
def test_ranks_without_tokens_and_experts_without_tokens(world: World) -> None:
    enter(world)
    made = mixture_of("mixtral", world.seed)
    experts = made.model.layers[0].mlp.experts
    spread = apply_expert_parallel(copy.deepcopy(made), mesh_of(4)).model.layers[0].mlp.experts
    tokens = torch.randn(5, 16, generator=torch.Generator().manual_seed(world.seed))
    chosen, weights = torch.tensor([[0, 1]]).expand(5, 2), torch.full((5, 2), 0.25)
    count = 5 if world.rank == 1 else 0  # another rank than that of the experts 0 and 1
    own = tokens[:count].clone().requires_grad_()
    found = spread(own, chosen[:count], weights[:count])
    found.square().sum().backward()
    tokens.requires_grad_()
    expected = experts(tokens, chosen, weights)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected[:count])
    torch.testing.assert_close(own.grad, tokens.grad[:count])
    for name, parameter in experts.named_parameters():
        gradient = local_tensor(spread.get_parameter(name).grad)
        torch.testing.assert_close(gradient, parameter.grad.chunk(4)[world.rank])


@on_ranks(4)
def test_llama_4_sends_routed_rows_alone(world: World) -> None:
    enter(world)
    made = mixture_of("llama4", world.seed).double()  # its sums are in another order
    experts = made.model.layers[0].feed_forward.experts
    spread = apply_expert_parallel(copy.deepcopy(made), mesh_of(4)).model.layers[0].feed_forward.experts
    generator = torch.Generator().manual_seed(world.seed)
    tokens = torch.randn(8, 5, 16, generator=generator, dtype=torch.float64)
    routed = torch.zeros(8, 5, 1, dtype=torch.float64)
    if world.rank != 2:  # which has no rows for any expert
        routed[[0, 0, 5, 7], [0, 3, 1, 2]] = 1.0  # the experts 2 and 3 of the second rank have none
    rows = (tokens * routed).view(-1, 16)
    own, full = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    with mock.patch.object(expert_parallel, "through_experts", wraps=through_experts) as exchange:
        found = spread(own)
    found.square().sum().backward()
    assert len(exchange.call_args.args[0]) == (0 if world.rank == 2 else 4), world.seed
    expected = experts(full)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own.grad, full.grad)
    sums = {name: sum(world.everyone(each.grad)) for name, each in experts.named_parameters()}
    for name, total in sums.items():
        gradient = local_tensor(spread.get_parameter(name).grad)
        torch.testing.assert_close(gradient, total.chunk(4)[world.rank])


def adapted(model: Any) -> Any:
    """A model with adapters of the experts' own parameters."""
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=[], target_parameters=names, r=2))


@on_ranks(4)
@pytest.mark.parametrize("first", ["adapters", "experts"])
def test_adapters_of_spread_experts_are_refused_by_name(world: World, first: str) -> None:
    enter(world)
    model = mixture_of("mixtral", world.seed)
    refused = pytest.raises(
        ValueError, match=r"expert parameter '.*mlp\.experts.*_proj': expected no adapters"
    )
    if first == "adapters":
        model = adapted(model)
        with refused:
            apply_expert_parallel(model, mesh_of(2))
        assert not any(map(is_distributed, model.parameters()))
        assert apply_expert_parallel(model, mesh_of(1)) is model  # on one rank nothing is spread
        return
    model = adapted(apply_expert_parallel(model, mesh_of(2)))
    with refused:
        zero_ext.prepare(model, optimizer_of(model), {"stage": 2}, process_group=mesh_of(2))


# Mixtures of transformers with other interfaces, and what is said about them.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "jetmoe": (
        {"num_hidden_layers": 1, "kv_channels": 4, "num_key_value_heads": 2, "num_local_experts": 4},
        "got 'model.layers.0.mlp.input_linear' (JetMoeParallelExperts) with {'weight': (4, 16, 16)} and a "
        "forward (self, inputs, expert_size). Leave apply_expert_parallel and",
    ),
    "longcat_flash": (
        {
            **LATENT,
            "num_layers": 1,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 4,
        },
        "got stacks of different sizes {'gate_up_proj': 6, 'down_proj': 4}. Leave apply_expert_parallel out",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_interfaces_are_refused_with_the_reason(world: World, kind: str) -> None:
    enter(world)
    sizes, words = OTHERS[kind]
    common = {"hidden_size": 16, "vocab_size": 32, "num_attention_heads": 2}
    narrow = {"intermediate_size": 8, "ffn_hidden_size": 8, "expert_ffn_hidden_size": 8}
    known = vars(AutoConfig.for_model(kind))
    chosen = {**{name: value for name, value in {**common, **narrow}.items() if name in known}, **sizes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **chosen))
    with pytest.raises(ValueError, match=re.escape(words)):
        apply_expert_parallel(model, mesh_of(2))


def quantized(family: str, seed: int) -> Any:
    """A model with experts in integers."""
    model = mixture_of(family, seed)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    return model


REFUSED: list[tuple[str, dict[str, int], str]] = [
    ("mixtral", {"tp": 2}, "mesh: expected one with the dimension 'ep', got ['pp', 'dp', 'cp', 'tp']"),
    ("mixtral", {"ep": 2, "tp": 2}, "longer than 1 for experts of transformers, got {'tp': 2}"),
    ("mixtral", {"ep": 2, "pp": 2}, "longer than 1 for experts of transformers, got {'pp': 2}"),
    ("mixtral", {"ep": 2, "cp": 2}, "longer than 1 for experts of transformers, got {'cp': 2}"),
    ("listed", {"ep": 2}, "ListedExperts: expected a model with experts that are stacked in parameters"),
    (
        "uneven",
        {"ep": 4},
        "'model.layers.0.mlp.experts' (MixtralExperts): expected a multiple of ep (4), got 6",
    ),
    ("quantized", {"ep": 2}, "expected 'down_proj' unquantized, got torch.int8"),
]


@on_ranks(4)
@pytest.mark.parametrize(("model", "lengths", "message"), REFUSED)
def test_what_cannot_be_spread(world: World, model: str, lengths: dict[str, int], message: str) -> None:
    enter(world)
    if model == "uneven":
        made = mixture_of("mixtral", world.seed, num_local_experts=6, num_experts=6)
    else:
        made = quantized("mixtral", world.seed) if model == "quantized" else mixture_of(model, world.seed)
    mesh = make_mesh(**lengths, device_type="cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_expert_parallel(made, mesh)
    assert not any(is_distributed(parameter) for parameter in made.parameters())


@on_ranks(4)
def test_what_prepare_refuses_and_a_second_call(world: World) -> None:
    enter(world)
    model = apply_expert_parallel(mixture_of("mixtral", world.seed), mesh_of(2))
    with pytest.raises(ValueError, match="got some that are spread already"):
        apply_expert_parallel(model, mesh_of(2))
    shampoo = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="got SGD, which needs full tensors"):
        zero_ext.prepare(model, shampoo, {"stage": 2}, process_group=mesh_of(2), whole_tensors=True)
    with pytest.raises(ValueError, match=re.escape("with the 'ep' ranks")):
        zero_ext.prepare(model, optimizer_of(model), {"stage": 2}, process_group=mesh_of(4))
