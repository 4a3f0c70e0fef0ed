"""Models of transformers cut into stages, under ZeRO and with split tensors: as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
)

import zero_ext
from tests.integrations.transformers.models import VOCABULARY, enter, gpt2, llama, reloaded
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint import export_huggingface
from zero_ext.config import ConfigError
from zero_ext.integrations.transformers import sparsify_attention
from zero_ext.parallel import apply_tensor_parallel, make_mesh
from zero_ext.parallel.pipeline import Pipeline, apply_pipeline_parallel
from zero_ext.zero import engine_of

STEPS, SAMPLES, LENGTH, LAYERS = 3, 8, 10, 3
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "vocab_size": VOCABULARY}


def built(kind: str, seed: int, tied: bool) -> Any:
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return gpt2(seed, n_layer=LAYERS, tie_word_embeddings=tied, **dropouts)
    if kind == "bloom":
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY}
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("bloom", tie_word_embeddings=tied, **sizes)
        )
    if kind == "bert":
        torch.manual_seed(seed)
        return AutoModelForMaskedLM.from_config(encoder(kind, LAYERS, tie_word_embeddings=tied))
    return llama(seed, num_hidden_layers=LAYERS, tie_word_embeddings=tied)


def encoder(kind: str, layers: int, **options: Any) -> Any:
    """The configuration of a small BERT or RoBERTa without dropout."""
    sizes = {**SMALL, "num_hidden_layers": layers, "num_attention_heads": 4}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return AutoConfig.for_model(kind, **sizes, **dropouts, **options)


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]


def mask_of(words: torch.Tensor) -> torch.Tensor:
    """The last two of every sample are padding."""
    mask = torch.ones_like(words)
    mask[:, -2:] = 0
    return mask


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train_alone(model: Any, seed: int) -> tuple[list[float], list[float]]:
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for words in batches(seed):
        loss = model(input_ids=words, attention_mask=mask_of(words), labels=words).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


class Course:
    """A model in stages on a mesh of lengths ``pp`` and ``tp``, prepared."""

    def __init__(self, model: Any, pp: int, tp: int, config: dict[str, Any], **options: Any) -> None:
        mesh = make_mesh(pp=pp, tp=tp, device_type="cpu")
        apply_tensor_parallel(model, mesh)
        module = apply_pipeline_parallel(model, mesh, inputs=("input_ids", "attention_mask"), **options)
        self.model, optimizer = zero_ext.prepare(module, optimizer_of(module), config, process_group=mesh)
        self.pipeline = Pipeline(self.model, optimizer, micro_batches=2)
        self.data = mesh["dp"]

    def steps(self, seed: int) -> tuple[list[float], list[float | None]]:
        share = SAMPLES // self.data.size()
        own = slice(share * self.data.get_local_rank(), share * (self.data.get_local_rank() + 1))
        losses, norms = [], []
        for words in batches(seed):
            loss = self.pipeline.train_batch(words[own], mask_of(words)[own], targets=words[own])
            losses.append(float(loss))
            norms.append(engine_of(self.model).grad_norm)
        return losses, norms


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize(
    ("kind", "stage", "tp", "tied", "options"),
    [
        ("llama", 0, 1, True, {}),
        ("llama", 2, 2, True, {}),
        ("llama", 3, 1, True, {"schedule": "interleaved", "chunks": 2}),
        ("llama", 3, 2, False, {}),
        ("gpt2", 3, 1, True, {"schedule": "zbv"}),
        ("gpt2", 1, 2, True, {}),
        ("bloom", 3, 2, True, {}),
        ("bert", 3, 1, True, {}),
        ("bert", 2, 2, True, {}),
        ("bert", 1, 1, False, {"schedule": "interleaved", "chunks": 2}),
    ],
)
def test_steps_are_those_of_one_process(
    world: World, kind: str, stage: int, tp: int, tied: bool, options: dict[str, Any]
) -> None:
    enter(world)
    config = {"stage": stage, "gradient_clipping": 0.5, "timeout_seconds": 120.0}
    course = Course(built(kind, world.seed, tied), 2, tp, config, **options)
    alone = built(kind, world.seed, tied)
    names = {name for name, _ in alone.named_parameters(remove_duplicate=False)}
    own = {name for name, _ in course.model.named_parameters(remove_duplicate=False)}
    assert {name.removeprefix("module.") for name in own} < names
    losses, norms = course.steps(world.seed)
    wanted_losses, wanted_norms = train_alone(alone, world.seed)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-5, atol=0)
    folder = world.shared_folder()
    zero_ext.save_checkpoint(folder / "saved", course.model).wait()
    if world.rank == 0:
        export_huggingface(folder / "saved", folder / "exported")
        alone.config.save_pretrained(folder / "exported")
    world.barrier()
    words = batches(world.seed + 1)[0]
    found, wanted = reloaded(folder / "exported", alone)(words).logits, alone.eval()(words).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def four_layers(kind: str) -> Any:
    if kind in ("bert", "roberta"):
        return AutoModelForMaskedLM.from_config(encoder(kind, 4))
    options: dict[str, Any] = {"num_key_value_heads": 1} if kind in ("qwen2", "mistral") else {}
    if kind == "qwen2":
        options["layer_types"] = ["full_attention", "sliding_attention"] * 2
        options |= {"sliding_window": 3, "use_sliding_window": True}
    config = AutoConfig.for_model(kind, **{**SMALL, "num_hidden_layers": 4, **options})
    return AutoModelForCausalLM.from_config(config)


@on_ranks(1)
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt_neox", "bloom", "bert", "roberta"])
def test_stages_one_after_another_are_the_model(world: World, kind: str) -> None:
    enter(world)
    torch.manual_seed(world.seed)
    model = four_layers(kind).eval()
    words = batches(world.seed)[0]
    mask = mask_of(words)
    if kind in ("bert", "roberta"):
        mask = mask.roll(1, 1)  # padding is not only behind
    options = {"schedule": "interleaved", "chunks": 3, "split": "uniform"}
    inputs = ("input_ids", "attention_mask")
    stages = apply_pipeline_parallel(model, make_mesh(device_type="cpu"), inputs=inputs, **options).eval()
    values: Any = (words, mask)
    for chunk in range(3):
        values = stages(chunk, *values)
    torch.testing.assert_close(values, model(words, attention_mask=mask).logits, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_sparse_attention_comes_before_the_stages(world: World) -> None:
    enter(world)
    layout: dict[str, Any] = {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 1}
    layout["attention"] = "unidirectional"
    # Weights so large that what a word attends to matters.
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
    model = llama(world.seed, **shape)
    sparsify_attention(model, layout)
    mesh = make_mesh(pp=2, device_type="cpu")
    module = apply_pipeline_parallel(model, mesh, inputs=("input_ids", "attention_mask"))
    config = {"stage": 3, "timeout_seconds": 120.0}
    with pytest.raises(ConfigError, match=r"[Cc]all sparsify_attention"):
        zero_ext.prepare(module, None, {**config, "sparse_attention": layout}, process_group=mesh)
    prepared, optimizer = zero_ext.prepare(module, optimizer_of(module), config, process_group=mesh)
    words = batches(world.seed)[0].repeat(1, 8)  # several blocks
    pipeline = Pipeline(prepared, optimizer, micro_batches=2)
    loss = pipeline.train_batch(words, mask_of(words), targets=words)
    alone = llama(world.seed, **shape)
    dense = alone(words, attention_mask=mask_of(words), labels=words)
    sparsify_attention(alone, layout)
    sparse = alone(words, attention_mask=mask_of(words), labels=words)
    assert float(loss) == pytest.approx(float(sparse.loss), rel=1e-5)
    assert float((sparse.logits - dense.logits).abs().max()) > 0.1  # the two losses may lie close


def refused(model: nn.Module, words: str, mesh: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        apply_pipeline_parallel(model, mesh, **options)


@on_ranks(2)
def test_models_that_cannot_be_split(world: World) -> None:
    enter(world)
    mesh = make_mesh(pp=2, device_type="cpu")
    opt = AutoConfig.for_model("opt", ffn_dim=16, word_embed_proj_dim=16, **SMALL)
    refused(AutoModelForCausalLM.from_config(opt), r"OPTForCausalLM: expected a plan .* got none", mesh)
    pooled = AutoModelForPreTraining.from_config(encoder("bert", 2))
    refused(pooled, r"'bert.pooler.dense.weight' \(16, 16\) is in no part", mesh)
    esmc = AutoModelForMaskedLM.from_config(AutoConfig.for_model("esmc", **SMALL))
    refused(esmc, r"EsmcModel: expected an argument 'inputs_embeds', .* got none", mesh)
    scaled = AutoConfig.for_model("granite", **SMALL, num_key_value_heads=1, embedding_multiplier=2.0)
    changes = "GraniteForCausalLM: it changes hidden states outside of its layers"
    refused(AutoModelForCausalLM.from_config(scaled), changes, mesh)
    judged = AutoConfig.for_model("llama", **SMALL, num_key_value_heads=1)
    headless = r"LlamaForSequenceClassification: expected a head for words, .* got none"
    refused(AutoModelForSequenceClassification.from_config(judged), headless, mesh)

    class Renamed(BertForMaskedLM):
        """Its loss does not shift labels, which its name no longer says."""

    refused(Renamed(encoder("bert", 2)), "the loss of Renamed does not follow from its name", mesh)
    model = llama(world.seed)
    refused(model.model, r"LlamaModel: expected a plan for pipelines .* got none", mesh)
    refused(model, "a weight for each of the 4 layers, got 3", mesh, split=[1.0] * 3)
    types = {"inputs": ("input_ids", "token_type_ids")}
    refused(model, r"expected inputs without 'token_type_ids', .* got ", mesh, **types)
    context = make_mesh(cp=2, device_type="cpu")
    refused(model, "'cp' of the mesh is 2, and the model's own loss needs full sequences", context)
    alone = make_mesh(device_type="cpu")
    refused(llama(world.seed), "'layer_major' needs layers", alone, schedule="layer_major")
    model.config.output_router_logits = True
    refused(model, "output_router_logits, and that loss needs the routers of all stages", mesh)
    model.config.output_router_logits = False
    model.model.register_parameter("prefix", nn.Parameter(torch.zeros(4)))
    refused(model, r"'model.prefix' \(4,\) is in no part of the plan", mesh)


@on_ranks(1)
def test_a_head_in_tiles_is_trained(world: World) -> None:
    enter(world)
    model = built("llama", world.seed, tied=False)
    before = model.lm_head.weight.detach().clone()
    config = {"stage": 3, "units": {"tiles": {"lm_head": 2}}}
    course = Course(model, 1, 1, config, schedule="interleaved", chunks=2)
    course.steps(world.seed)
    found = zero_ext.full_state_dict(course.model)
    assert float((found["lm_head.weight"] - before).abs().max()) > 1e-3
