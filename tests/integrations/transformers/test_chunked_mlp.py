"""The configuration's section 'mlp': losses and updates of the plain model, intermediates of one chunk."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import MobileBertConfig, MobileBertModel, RwkvConfig, RwkvForCausalLM

import zero_ext
from tests.activation.live_bytes import LiveBytes
from tests.integrations.transformers.beside_one_process import optimizer_of
from tests.integrations.transformers.causal_models import batches, check_trains_as, model_of
from tests.integrations.transformers.mixtures import mixture_of
from tests.integrations.transformers.models import bert, gpt2, llama
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.integrations.transformers.chunked_mlp import chunk_mlp
from zero_ext.zero import engine_of

CHUNK = 5


def with_lora(seed: int) -> Any:
    torch.manual_seed(seed)
    targets = ["q_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(llama(seed), settings)


FAMILIES: dict[str, Any] = {
    "llama": llama,
    "llama, checkpoints": llama,
    "llama, lora": with_lora,
    "gpt2": partial(gpt2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "gemma2": partial(model_of, "Gemma2", head_dim=8, query_pre_attn_scalar=8),
    "qwen3": partial(model_of, "Qwen3", head_dim=8),
    "mistral, checkpoints": partial(model_of, "Mistral"),
    "apertus": partial(model_of, "Apertus"),
    "phi": partial(model_of, "Phi"),
    "gpt-neox": partial(model_of, "GPTNeoX"),
    "bloom, residual in the network": partial(model_of, "Bloom", n_layer=2, n_head=4),
    "deepseek_v3, a mixture and a network": lambda seed: mixture_of("deepseek_v3", seed, vocab_size=64),
}


def networks(model: nn.Module) -> list[nn.Module]:
    """Those that are computed in chunks."""
    return [module for module in model.modules() if "forward" in vars(module)]


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_the_plain_model(world: World, family: str, stage: int) -> None:
    """The last step accumulates two batches."""
    model, plain = (FAMILIES[family](world.seed).train() for _ in range(2))
    if "checkpoints" in family:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {"stage": stage, "mlp": {"chunk_tokens": CHUNK}}
    model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=world.group)
    assert len(networks(model)) == (1 if "deepseek" in family else 2)
    first, second, third = batches(world)
    check_trains_as(world, model, optimizer, plain, [[first], [second, third]])


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_plain_model(family: str) -> None:
    plain = FAMILIES[family](0).double().train()
    if "mixture" in family:
        plain.set_experts_implementation("eager")  # the others refuse float64
    model, words = copy.deepcopy(plain), torch.arange(3, 63).view(3, -1)
    if "checkpoints" in family:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chunk_mlp(model.get_base_model() if "lora" in family else model, CHUNK)
    losses = [each(input_ids=words, labels=words).loss for each in (model, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("autocast", [True, False])
def test_narrow_dtypes_have_the_gradients_of_the_plain_model(autocast: bool) -> None:
    """Within the rounding of a sum over chunks."""
    plain = llama(0).train() if autocast else llama(0).train().to(torch.bfloat16)
    model, words = copy.deepcopy(plain), torch.arange(3, 63).view(2, -1)
    chunk_mlp(model, 15)
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            each(input_ids=words, labels=words).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (found.grad.float() - expected.grad.float()).norm() / expected.grad.float().norm()
        assert error < 8 * torch.finfo(torch.bfloat16).eps, name


def test_dropout_draws_the_same_numbers_in_backward() -> None:
    """As chunks that are not checkpointed, which draw in the same order."""
    model, words = gpt2(0, resid_pdrop=0.4).train(), torch.arange(3, 63).view(3, -1)
    plain = copy.deepcopy(model)
    chunk_mlp(model, 20)

    def in_chunks(network: Any, hidden: torch.Tensor) -> torch.Tensor:
        chunks = hidden.view(1, -1, hidden.shape[-1]).tensor_split(3, 1)
        return torch.cat([type(network).forward(network, each) for each in chunks], 1).view_as(hidden)

    for block in plain.transformer.h:
        block.mlp.forward = MethodType(in_chunks, block.mlp)
    for each in (model, plain):
        torch.manual_seed(5)
        each(input_ids=words, labels=words).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name


@on_ranks(2)
@pytest.mark.parametrize("checkpointed", [True, False])
def test_parameters_are_gathered_once_per_pass(world: World, checkpointed: bool) -> None:
    words = torch.arange(3, 27).view(2, -1)
    traffic = []
    for section in (None, {"chunk_tokens": 3}):
        model = llama(world.seed).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        config = {"stage": 3, "mlp": section}
        model, optimizer = zero_ext.prepare(model, optimizer_of(model), config, process_group=world.group)
        for _ in range(2):
            model.backward(model(words, labels=words).loss)
            optimizer.step()
            optimizer.zero_grad()
        traffic.append(dict(engine_of(model).traffic.last_elements))
    assert traffic[0]["gather"] > 0
    assert traffic[0] == traffic[1]


@pytest.mark.parametrize("train", [True, False])
def test_memory_is_that_of_a_chunk(train: bool) -> None:
    words, inner, found = torch.arange(3, 2051).view(4, -1) % 64, 512, {}
    for chunk in (None, 512, 64):
        model = llama(0, intermediate_size=inner, max_position_embeddings=512).train(train)
        if chunk is not None:
            chunk_mlp(model, chunk)
        with LiveBytes() as live, torch.set_grad_enabled(train):
            output = model(words, labels=words).loss
            if train:
                output.backward()
        found[chunk] = live.peak
    full = words.numel() * inner * 4
    # Without chunks each of two blocks saves four tensors of the inner width.
    assert found[None] - found[64] > (6 if train else 2) * full
    # Chunks of 512 have at least two such tensors of a quarter of the tokens more than chunks of 64.
    assert found[512] > found[64]
    assert found[64] < found[None] / (3 if train else 2)


def test_chunks_follow_the_last_configuration() -> None:
    model, words = llama(0).train(), torch.arange(3, 15)[None]
    keys, sizes = list(model.state_dict()), []
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[-2]))
    for section in ({"chunk_tokens": 4}, {"chunk_tokens": 6}, {}):
        zero_ext.prepare(model, None, {"mlp": section})
        model(words)
    zero_ext.prepare(model, None, {})
    model(words)
    assert list(model.state_dict()) == keys
    assert sizes == [4, 4, 4, 6, 6, 12, 12]
    assert not networks(model)


def test_networks_in_a_list_are_chunked_one_by_one() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intra_bottleneck_size": 16, "intermediate_size": 24, "embedding_size": 16}
    config = MobileBertConfig(
        **sizes, true_hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    plain, words = MobileBertModel(config).double().eval(), torch.arange(3, 63).view(3, -1)
    model = copy.deepcopy(plain)
    chunk_mlp(model, CHUNK)
    assert len(networks(model)) == 2 * (config.num_feedforward_networks - 1)
    for each in (model, plain):
        each(words).last_hidden_state.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-6, atol=1e-9)


def test_a_copy_calls_its_own_layers() -> None:
    model, words = llama(0), torch.arange(3, 15)[None]
    chunk_mlp(model, 4)
    expected = model(words).logits
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(words).logits, expected)


def test_a_refused_model_leaves_others_as_they_were() -> None:
    both = nn.ModuleDict({"first": llama(0), "second": bert(0)})
    with pytest.raises(zero_ext.ConfigError, match=r"mlp: module 'second' \(Bert\w*\): expected blocks"):
        zero_ext.prepare(both, None, {"mlp": {}})
    assert not networks(both)


@pytest.mark.parametrize("before", [None, 5])
@pytest.mark.parametrize("section", [{}, {"mlp": {"chunk_tokens": 7}}])
def test_a_refused_preparation_leaves_the_networks_as_they_were(
    before: int | None, section: dict[str, Any]
) -> None:
    model = llama(0)
    zero_ext.prepare(model, None, {} if before is None else {"mlp": {"chunk_tokens": before}})
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    foreign = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="optimizer"):
        zero_ext.prepare(model, foreign, section)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
    assert bool(networks(model)) == (before is not None)


def with_alora() -> Any:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["up_proj"], alora_invocation_tokens=[5])
    return peft.get_peft_model(llama(0), settings)


def with_layer(layer: nn.Module) -> Any:
    model = llama(0)
    model.model.layers[1].mlp.act_fn = layer
    return model


def with_forward() -> Any:
    model = llama(0)
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    return model


class Mixing(nn.Module):
    """Has a matrix over the tokens, as gMLP does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(12))


LAYERS = "expected linear layers, activations, norms over the width and dropout, got"


@pytest.mark.parametrize(
    ("make", "config", "match"),
    [
        (lambda: nn.Linear(2, 2), {}, "expected a model of transformers, got Linear"),
        (
            partial(model_of, "OPT", 0, ffn_dim=48, word_embed_proj_dim=32),
            {},
            "expected blocks with a module",
        ),
        (lambda: mixture_of("mixtral", 0), {}, "that is no mixture of experts, got none"),
        (lambda: RwkvForCausalLM(RwkvConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)), {}, LAYERS),
        (lambda: with_layer(nn.Conv1d(4, 4, 1)), {}, rf"{LAYERS} '\S+1.mlp.act_fn' \(Conv1d\)"),
        (lambda: with_layer(nn.GroupNorm(1, 4)), {}, rf"{LAYERS} '\S+1.mlp.act_fn' \(GroupNorm\)"),
        (lambda: with_layer(nn.LayerNorm((12, 48))), {}, rf"{LAYERS} '\S+1.mlp.act_fn' \(LayerNorm\)"),
        (lambda: with_layer(Mixing()), {}, rf"{LAYERS} '\S+1.mlp.act_fn' \(Mixing\)"),
        (with_alora, {}, "expected adapters of all tokens, got aLoRA in"),
        (with_forward, {}, "1.mlp' .*expected its own forward, got a replaced one"),
        (lambda: llama(0), {"units": {"tiles": {"model.layers.0.mlp.up_proj": 2}}}, "0.mlp.up_proj'"),
        (lambda: llama(0), {"units": {"block_classes": ["Linear"]}}, "gathered with their block, got"),
    ],
)
def test_models_that_it_cannot_serve_are_refused(make: Any, config: Any, match: str) -> None:
    model = make()
    with pytest.raises(zero_ext.ConfigError, match=f"mlp: .*{match}"):
        zero_ext.prepare(model, None, {"mlp": {}, **config})


def test_layers_gathered_alone_are_no_problem_where_nothing_is_gathered() -> None:
    model = llama(0)
    zero_ext.prepare(model, None, {"stage": 2, "mlp": {}, "units": {"tiles": {"Linear": 2}}})
    assert len(networks(model)) == 2


def test_other_arguments_of_a_network() -> None:
    """Those behind the tensors are passed on, and tensors behind them are refused."""
    model = llama(0)
    network: Any = model.model.layers[0].mlp
    seen = []

    class Network(type(network)):  # type: ignore[misc]
        def forward(self, hidden: Any, layer: Any = None, mask: Any = None) -> Any:
            seen.append((hidden.shape[-2], layer, mask))
            return super().forward(hidden)

    network.__class__ = Network
    chunk_mlp(model, 4)
    hidden = torch.randn(1, 8, 32)
    with torch.no_grad():
        for arguments in ({"layer": 3}, {"mask": None}, {}):
            torch.testing.assert_close(network(hidden, **arguments), super(Network, network).forward(hidden))
        assert seen == [(4, 3, None)] * 2 + [(4, None, None)] * 4
        with pytest.raises(TypeError, match=r"Network: expected tensors .* got .'hidden', 'mask'."):
            network(hidden, mask=torch.ones(8))
        with pytest.raises(ValueError, match=r"expected tensors .* with the same tokens"):
            network(hidden, torch.ones(8))
