"""Every style of a plan: outputs and gradients of a tiny model over two ranks are those of one process."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import mesh_of
from zero_ext.parallel import apply_tensor_parallel
from zero_ext.parallel.tensor.tp_plans import KNOWN_STYLES, style_problem
from zero_ext.zero.units.parameter_marks import tie_of

WIDTH, WORDS, HEADS = 8, 12, 4


class Pair(nn.Module):
    """Two projections, with something between them."""

    def __init__(self, wide: int = 2 * WIDTH, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between or nn.Tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(hidden)))


class Gate(nn.Module):
    """Halves side by side, of which one gates the other."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


class Slopes(nn.Module):
    """A factor for every head, each of which a rank applies to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(HEADS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.unflatten(-1, (len(self.slope), -1)) * self.slope[:, None]).flatten(-2)


class HeadNorm(nn.Module):
    """A norm of each head, with the same weight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH // HEADS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden.unflatten(-1, (-1, self.norm.normalized_shape[0]))).flatten(-2)


class Rotary(nn.Module):
    """Latent keys that are projected to heads, and numbers behind them that all heads use as they are."""

    qk_rope_head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.up = nn.Linear(WIDTH, WIDTH + 4), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        latent, keys = self.latent(hidden).split((WIDTH, 4), -1)
        heads = self.up(torch.tanh(latent)).unflatten(-1, (-1, 4))
        return self.down((heads * keys[..., None, :]).flatten(-2))


class Looked(nn.Module):
    """Vectors of words, normed if so wanted, and a share of each that heads multiply."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        words = torch.arange(hidden.shape[0] * hidden.shape[1]).view(hidden.shape[:2]) % WORDS
        return hidden + self.embedding(words)


class NormedEmbedding(nn.Embedding):
    """Vectors with a norm."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH, padding_idx=7)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(words))


class Biases(Pair):
    """Biases that belong to heads, from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HEADS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        biases = self.table(torch.arange(hidden.shape[1]))[..., None]
        heads = self.up(hidden).unflatten(-1, (biases.shape[1], -1)) + biases
        return self.down(torch.tanh(heads).flatten(-2))


class MultiQuery(nn.Module):
    """Four heads of queries that share one key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, 1, 2
        self.both, self.down = nn.Linear(WIDTH, (HEADS + 2) * 2), nn.Linear(HEADS * 2, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries, key, value = self.both(hidden).split((self.num_heads * 2, 2, 2), -1)
        heads = queries.unflatten(-1, (self.num_heads, 2)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, key[:, None], value[:, None])
        return self.down(attended.transpose(1, 2).flatten(2))


PAIR = {"block.up": "colwise", "block.down": "rowwise"}
# What a style is tried on: a block and a plan for it.
TRIALS: dict[str, tuple[Any, dict[str, str]]] = {
    "colwise": (Pair, PAIR),
    "rowwise": (Pair, PAIR),
    "packed_colwise": (lambda: Pair(4 * WIDTH, Gate()), {**PAIR, "block.up": "packed_colwise"}),
    "colwise_halves": (lambda: Pair(4 * WIDTH, Gate()), {**PAIR, "block.up": "colwise_halves"}),
    "colwise_gather_output": (
        Pair,
        {"block.up": "colwise_gather_output", "block.down": "rowwise_split_input"},
    ),
    "colwise_rep": (Pair, {"block.up": "colwise_rep", "block.down": "rowwise_rep"}),
    "rowwise_split_input": (Pair, {"block.down": "rowwise_split_input"}),
    "rowwise_rep": (Pair, {"block.down": "rowwise_rep"}),
    "replicate": (Pair, {**PAIR, "block.between": "replicate"}),
    "replicated_with_grad_allreduce": (
        lambda: Pair(between=HeadNorm()),
        {**PAIR, "block.between": "replicated_with_grad_allreduce"},
    ),
    "local_params": (
        lambda: Pair(between=Slopes()),
        {**PAIR, "block.between.slope": "colwise", "block.between": "local_params"},
    ),
    "mla_kv_a_proj": (Rotary, {**PAIR, "block.latent": "mla_kv_a_proj"}),
    "embedding_rowwise": (
        lambda: Looked(nn.Embedding(WORDS, WIDTH)),
        {"block.embedding": "embedding_rowwise"},
    ),
    "embedding_rowwise, normed": (
        lambda: Looked(NormedEmbedding()),
        {"block.embedding": "embedding_rowwise"},
    ),
    "embedding_colwise": (
        lambda: Looked(nn.Embedding(WORDS, WIDTH)),
        {"block.embedding": "embedding_colwise"},
    ),
    "embedding_heads": (Biases, {**PAIR, "block.table": "embedding_heads"}),
    "colwise_multi_query": (
        MultiQuery,
        {"block": "local_query_heads", "block.both": "colwise_multi_query", "block.down": "rowwise"},
    ),
}
# Styles that other tests try.
ELSEWHERE = {
    "colwise_thirds": "GPT-2 in tests/integrations/transformers",
    "colwise_split_logits": "tests/parallel/tensor/test_cross_entropy.py",
    "local_heads": "BLOOM and others in tests/integrations/transformers",
    "local_query_heads": "with colwise_multi_query",
    "packed_rowwise": "experts below",
    "moe_tp_experts": "experts below",
    "moe_identity_expert": "experts below",
    "all_reduce": "Inkling in tests/integrations/transformers",
}


class Model(nn.Module):
    """A block with something before and behind it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.behind = nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.behind(self.block(torch.tanh(self.before(hidden))))


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def full_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    if tie_of(parameter) is not None:
        dist.all_reduce(gradient, group=mesh_of(tp=2)["tp"].get_group())
    return gradient


def check(model: nn.Module, reference: nn.Module, seed: int) -> None:
    """Outputs and gradients of ``model`` on all ranks are those of ``reference`` alone."""
    hidden, weight = torch.randn(2, 2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    features, alone = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, wanted = model(features), reference(alone)
    torch.testing.assert_close(found, wanted)
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(features.grad, alone.grad)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_gradient(parameter), other.grad, msg=name)


@on_ranks(4)
@pytest.mark.parametrize("style", list(TRIALS))
def test_outputs_and_gradients_are_those_of_one_process(world: World, style: str) -> None:
    made, plan = TRIALS[style]
    model = filled(Model(made()).double(), world.seed)
    reference = copy.deepcopy(model)
    apply_tensor_parallel(model, mesh_of(tp=2), plan)
    check(model, reference, world.seed)


class Experts(nn.Module):
    """Gated experts whose weights are [experts, out, in], or [experts, in, out], and one without weights."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        up, down = ((3, WIDTH, 16), (3, 8, WIDTH)) if transposed else ((3, 16, WIDTH), (3, WIDTH, 8))
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(down))
        self.identity, self.transposed = nn.Identity(), transposed

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = weights[..., 3:] * self.identity(hidden)
        for expert in range(3):
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            up, down = (up, down) if self.transposed else (up.t(), down.t())
            gate, wide = (hidden @ up).chunk(2, -1)
            total = total + weights[..., expert : expert + 1] * (F.silu(gate) * wide @ down)
        return total


class Mixture(nn.Module):
    """Experts behind a router."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts(transposed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden, self.router(hidden).softmax(-1))


def expert_plan(transposed: bool) -> dict[str, str]:
    return {
        "block.experts": "moe_tp_experts",
        "block.experts.identity": "moe_identity_expert",
        "block.experts.gate_up_proj": "packed_rowwise" if transposed else "packed_colwise",
        "block.experts.down_proj": "colwise" if transposed else "rowwise",
    }


@on_ranks(4)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_those_of_one_process(world: World, transposed: bool) -> None:
    model = filled(Model(Mixture(transposed)).double(), world.seed)
    reference = copy.deepcopy(model)
    apply_tensor_parallel(model, mesh_of(tp=2), expert_plan(transposed))
    weight = model.get_parameter("block.experts.gate_up_proj")
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == ((3, WIDTH, 8) if transposed else (3, 8, WIDTH))
    assert torch.equal(weight.full_tensor(), reference.get_parameter("block.experts.gate_up_proj"))
    check(model, reference, world.seed)


def test_every_style_is_tried() -> None:
    assert {*KNOWN_STYLES} == {*[name for name in TRIALS if "," not in name], *ELSEWHERE}


def shipped_plans() -> Iterator[tuple[str, dict[str, str]]]:
    """The plans that transformers has, by the classes of configurations, and those of its heads."""
    models = importlib.import_module("transformers.models")
    base: Any = importlib.import_module("transformers.configuration_utils").PreTrainedConfig
    for folder in pkgutil.iter_modules(models.__path__):
        if not folder.ispkg:
            continue
        package = importlib.import_module(f"transformers.models.{folder.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if file.name.startswith("configuration_"):
                module = importlib.import_module(f"{package.__name__}.{file.name}")
                for name, each in vars(module).items():
                    own = isinstance(each, type) and issubclass(each, base)
                    if own and each.__module__ == module.__name__ and each.base_model_tp_plan:
                        yield name, each.base_model_tp_plan


def test_every_style_that_transformers_ships_is_known_or_refused_by_name() -> None:
    plans = list(shipped_plans())
    assert len(plans) > 100
    styles = {(style, name) for name, plan in plans for style in plan.values()}
    assert [(style, name) for style, name in styles if style_problem(style)] == []
    registry = importlib.import_module("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    problems = {name: style_problem(name) for name in registry}
    assert len(problems) > 15
    assert not [name for name, problem in problems.items() if problem.startswith("It is unknown")]
    refused = {name for name, problem in problems.items() if problem}
    assert refused == {"sequence_parallel", "grouped_gemm", "ep_dispatch_experts"}


@on_ranks(4)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"block.up": "sequence_parallel"}, "not supported: its neighbors' layouts must match"),
        ({"block.up": "grouped_gemm"}, "not supported: it places experts on ranks"),
        ({"block.up": "ep_router"}, "not supported: it places experts on ranks"),
        ({"block.up": "local_colwise"}, "not supported: it is one of transformers 4"),
        (
            {"block.up": "sideways"},
            "style 'sideways' of 'block.up' cannot be applied. It is unknown. Use one of colwise, ",
        ),
        ({"block": "packed_rowwise"}, "expected a parameter, got a module"),
        ({"block.up": "colwise_multi_query"}, "expected head_dim in its attention module"),
        ({"block.up.weight": "local_params"}, "style of the parameter 'block.up.weight': expected one of"),
        ({"block.odd": "packed_colwise"}, "a multiple of tp (2 times 2 side by side) in dimension 0"),
        ({"block.odd.bias": "colwise"}, "'block.odd.bias': expected a multiple of tp (2) in dimension 0"),
        ({"block.left": "colwise"}, "expected 'block.right' to be split as the modules"),
        ({"block.nothing": "colwise"}, "expected 'block.nothing' to name a module or parameter of Model"),
    ],
)
def test_plans_that_are_refused(world: World, plan: dict[str, str], message: str) -> None:
    model = Model(Pair())
    model.block.odd = nn.Linear(WIDTH, 9)
    model.block.left, model.block.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.block.right.weight = model.block.left.weight
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_tensor_parallel(model, mesh_of(tp=2), plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
