"""Parameters in unusual places and shapes, and modules that return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.case import Case, sgd
from tests.zoo.inputs import classification, features, labeled, mean_square, next_token, sequences, tokens

SIZE = 6


class Lists(nn.Module):
    """ParameterList and ParameterDict, nested, with indices computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(SIZE, SIZE) * 0.3) for _ in range(3)])
        self.extra = nn.ParameterDict({"left": nn.Parameter(torch.zeros(SIZE)), "right": torch.ones(SIZE)})
        self.nested = nn.ModuleDict({"inner": nn.ParameterList([torch.zeros(1)])})

    def forward(self, x):
        for i in range(len(self.weights)):
            x = torch.tanh(x @ self.weights[i]) + self.extra["left" if i % 2 else "right"]
        for value in self.extra.values():
            x = x * (1 + value)
        return x + self.nested["inner"][0]


class ZeroDimensional(nn.Module):
    """Scalars without a dimension, and parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.1))
        self.empty, self.hollow = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = self.layer(x) * self.a + self.b
        return torch.cat([x, self.empty.expand(x.shape[0], 0)], 1) + self.hollow.sum()


class OnlyScalar(nn.Module):
    """The whole model is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.value


class PlainLists(nn.Module):
    """Registered parameters that forward takes from a plain list and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = []
        for i in range(2):
            w = nn.Parameter(torch.randn(SIZE, SIZE) * 0.3)
            self.register_parameter(f"w{i}", w)
            self.stages.append(w)
        self.layers = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        for i, layer in enumerate(self.layers):
            self.add_module(f"layer{i}", layer)
        self.apply_last = lambda x: F.linear(x, self.layers[1].weight)

    def forward(self, x):
        for w, layer in zip(self.stages, self.layers, strict=True):
            x = torch.tanh(layer(x @ w))
        return self.apply_last(x)


class SharedMemory(nn.Module):
    """Two parameters over one memory, made by ``Parameter(other.data)``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(SIZE, SIZE) * 0.3)
        self.b = nn.Parameter(self.a.data)

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class OverlappingViews(nn.Module):
    """Parameters that are views of one tensor, apart from each other."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * SIZE * SIZE) * 0.3
        self.a = nn.Parameter(flat[: SIZE * SIZE].view(SIZE, SIZE))
        self.b = nn.Parameter(flat[SIZE * SIZE :].view(SIZE, SIZE))
        self.c = nn.Parameter(torch.zeros(1).expand(SIZE).clone())

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b + self.c


class Tied(nn.Module):
    """A module that occurs twice, a weight under three names, and a transposed use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(SIZE, 4)
        self.again = self.encoder
        self.decoder_bias = nn.Parameter(torch.zeros(SIZE))
        self.third = nn.Linear(SIZE, 4, bias=False)
        self.third.weight = self.encoder.weight

    def forward(self, x):
        h = torch.relu(self.encoder(x)) + self.again(x) + self.third(x)
        return F.linear(h, self.encoder.weight.t(), self.decoder_bias)


# What a module returns of its parameter [3, SIZE].
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda value: value,
    "row": lambda value: value[0],
    "slice": lambda value: value[:2],
    "none": lambda value: value[None, :2],
    "expand": lambda value: value[:2].unsqueeze(0).expand(4, -1, -1),
    "transpose": lambda value: value.t(),
    "view": lambda value: value.view(1, 3, SIZE)[:, :2],
    "clone": lambda value: value[:2].clone(),
    "detach": lambda value: value.detach(),
    "dict": lambda value: {"rows": value[:2], "row": value[2]},
    "unbind": lambda value: value.unbind(0),
}


class Giver(nn.Module):
    """A module whose forward returns its parameter, or a view of it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(3, SIZE))
        self.form = form

    def forward(self):
        return FORMS[self.form](self.value)


class Taker(nn.Module):
    """Calls the giver early and uses the result after other blocks."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.giver = Giver(form)
        self.blocks = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)])

    def forward(self, x):
        returned = self.giver()
        for block in self.blocks:
            x = torch.tanh(block(x))
        if isinstance(returned, dict):
            return x @ returned["rows"].t() + returned["row"].sum()
        if isinstance(returned, tuple):
            return x * returned[0] + returned[1] * returned[2]
        if self.giver.form == "transpose":
            return x @ returned
        return x @ returned.reshape(-1, SIZE).t()


class Memo(nn.Module):
    """Keeps a computed tensor of its parameters from one forward to a method called later in it."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.randn(SIZE, 2)), nn.Parameter(torch.randn(2, SIZE))
        self.body = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)])

    @property
    def weight(self):
        return self.low @ self.high

    def forward(self, x):
        self.stored = self.weight
        for layer in self.body:
            x = torch.tanh(layer(x @ self.stored))
        return x + self.stored.sum()


class Symmetric(nn.Module):
    """A parametrization by hand, with its inverse."""

    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x * self.log_scale.exp()


def parametrized(*kinds: Any) -> Any:
    """Return a builder of two linear layers with parametrized weights."""

    def build() -> nn.Module:
        layers = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        for kind in kinds:
            layers = [kind(layer) for layer in layers]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1])

    return build


def cached(build: Any) -> nn.Module:
    """Return a module whose forward caches its parametrizations."""
    inner = build()

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with parametrize.cached():
                return self.inner(x) + self.inner(x * 0.5)

    return Cached()


def registered(parametrization: type[nn.Module]) -> Any:
    """Return a function that registers a parametrization of a layer's weight."""

    def register(layer: nn.Module) -> nn.Module:
        parametrize.register_parametrization(layer, "weight", parametrization())
        return layer

    return register


class MixedUse(nn.Module):
    """Parameters that are frozen, unused, or used in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.only_eval = nn.Parameter(torch.randn(SIZE))
        self.register_parameter("none", None)
        self.register_buffer("no_mask", None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(SIZE), persistent=False)

    def forward(self, x):
        self.calls += 1
        x = self.frozen(self.used(x))
        return x if self.training else x * self.only_eval


class Lookup(nn.Module):
    """Embeddings with a padding index, a bag with weights for each sample, and tables in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(17, SIZE, padding_idx=0)
        self.bag = nn.EmbeddingBag(17, SIZE, mode="mean", padding_idx=0)
        self.tables = nn.ModuleList([nn.Embedding(17, SIZE) for _ in range(2)])
        self.head = nn.Linear(SIZE, 17)

    def forward(self, ids):
        x = self.words(ids) + self.bag(ids)[:, None]
        for i, table in enumerate(self.tables):
            x = x + table(ids.roll(i + 1, 1))
        return self.head(x)


class NormedTable(nn.Module):
    """A norm of a whole table, from which words are looked up, as RWKV's inference code does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(17, SIZE), nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, 17, bias=False)

    def forward(self, ids):
        return self.head(F.embedding(ids, self.norm(self.table.weight)))


class ViewedAsComplex(nn.Module):
    """S4D: complex parameters are kept as real pairs. Parameters have attributes for the optimizer."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.C = nn.Parameter(torch.view_as_real(torch.randn(SIZE, n, dtype=torch.cfloat)))
        self.log_dt = nn.Parameter(torch.rand(SIZE) * 2 - 4)
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(SIZE, n)))
        self.log_dt._optim = self.log_A_real._optim = {"weight_decay": 0.0}

    def forward(self, u):
        dtA = -torch.exp(self.log_A_real) * torch.exp(self.log_dt).unsqueeze(-1)
        kernel = torch.exp(dtA.unsqueeze(-1) * torch.arange(u.shape[1]))
        kernel = torch.einsum("hn,hnl->hl", torch.view_as_complex(self.C), kernel.to(torch.cfloat)).real
        transformed = torch.fft.rfft(kernel, n=2 * u.shape[1]) * torch.fft.rfft(
            u.transpose(1, 2), n=2 * u.shape[1]
        )
        return torch.fft.irfft(transformed, n=2 * u.shape[1])[..., : u.shape[1]].transpose(1, 2)


def sparse_tables() -> nn.Module:
    """Return an embedding with sparse gradients and a head."""
    return nn.Sequential(nn.Embedding(17, SIZE, sparse=True), nn.Linear(SIZE, 17))


def structure(name: str, build: Any, **more: Any) -> Case:
    """Return a case of a module of six features."""
    return Case(f"own/structure/{name}", build, **({"batch": features(SIZE), "loss": mean_square} | more))


CASES = [
    structure("lists-and-dicts", Lists),
    structure("zero-dimensional", ZeroDimensional),
    structure("only-scalar", OnlyScalar),
    structure("plain-lists", PlainLists),
    structure(
        "shared-memory",
        SharedMemory,
        expected=r"memory|storage|share",
        reason="two parameters over one memory",
    ),
    structure("views-of-one-tensor", OverlappingViews),
    structure("tied-three-names", Tied),
    *(structure(f"giver-{form}", lambda form=form: Taker(form)) for form in FORMS),
    structure("memo", Memo),
    structure("weight-norm-old", parametrized(nn.utils.weight_norm)),
    structure("weight-norm", parametrized(parametrizations.weight_norm)),
    structure("spectral-norm-old", parametrized(nn.utils.spectral_norm)),
    structure("spectral-norm", parametrized(parametrizations.spectral_norm)),
    structure("orthogonal", parametrized(parametrizations.orthogonal), optimizer=sgd),
    structure(
        "orthogonal-cayley", parametrized(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"))
    ),
    structure("symmetric-scaled", parametrized(registered(Symmetric), registered(Scaled))),
    structure("cached-parametrizations", lambda: cached(parametrized(registered(Symmetric)))),
    structure("mixed-use", MixedUse),
    Case("own/structure/lookups", Lookup, tokens(17, 5), next_token),
    Case("own/structure/normed-table", NormedTable, tokens(17, 5), next_token),
    structure("viewed-as-complex", ViewedAsComplex, batch=sequences(7, SIZE)),
    Case(
        "own/structure/sparse-gradients",
        sparse_tables,
        tokens(17, 5),
        next_token,
        optimizer=sgd,
        expected=r"sparse",
        reason="sparse gradients",
    ),
    structure(
        "double-precision",
        lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)).double(),
        batch=lambda s: features(SIZE)(s).double(),
        expected=r"float64",
        reason="dtype",
    ),
    structure(
        "bilinear",
        lambda: nn.ModuleList([nn.Bilinear(SIZE, SIZE, 3)])[0],
        loss=lambda m, x: m(x, x).square().mean(),
    ),
    structure(
        "prelu-and-norms",
        lambda: nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.PReLU(SIZE), nn.RMSNorm(SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 3)
        ),
        batch=labeled(SIZE, 3),
        loss=classification,
    ),
]
